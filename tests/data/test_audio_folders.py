"""Sounds from folders: values, lengths and rates, and errors that name the file."""

import cloudpickle
import numpy as np
import pytest
from flax import linen as nn
from scipy.io import wavfile

import trainer
from trainer.data import audio_dataset_from_directory

RATE = 8000


def tone(samples, pitch, rate=RATE):
    return np.sin(2 * np.pi * pitch * np.arange(samples) / rate)


def write(path, values, rate=RATE, dtype=np.int16):
    path.parent.mkdir(parents=True, exist_ok=True)
    scale = -float(np.iinfo(dtype).min) if np.issubdtype(dtype, np.signedinteger) else 1
    wavfile.write(path, rate, np.clip(values * scale, -scale, scale - 1 if scale > 1 else 1).astype(dtype))


@pytest.fixture
def folder(tmp_path):
    for name, pitch in (("high", 1000), ("low", 100)):
        for number in range(4):
            write(tmp_path / name / f"{number}.wav", 0.5 * tone(64, pitch + 10 * number))
    return tmp_path


def rows(directory, **arguments):
    return audio_dataset_from_directory(directory, batch_size=None, shuffle=False, verbose=False, **arguments).rows


@pytest.mark.slow
def test_sounds_are_trained_on(folder):
    dataset = audio_dataset_from_directory(folder, label_mode="binary", batch_size=4, seed=1, verbose=False)
    assert dataset.class_names == ["high", "low"]
    assert [(x.shape, x.dtype, y.shape) for x, y in dataset] == [((4, 64, 1), np.float32, (4, 1))] * 2
    model = trainer.Sequential([nn.Conv(4, (8,)), nn.relu, lambda x: x.mean(1), nn.Dense(1)])
    model.compile(trainer.optimizers.Adam(0.02), trainer.losses.BinaryCrossentropy(from_logits=True))
    losses = model.fit(dataset, epochs=10, verbose=0).history["loss"]
    assert losses[-1] < 0.9 * losses[0]


def test_values_are_those_of_16_bits(folder):
    # As TensorFlow's `decode_wav`, by which Keras reads: the integer / 32768.
    _, values = wavfile.read(folder / "low" / "2.wav")
    sound, label = rows(folder)[6]
    assert (sound[:, 0] * 32768).tolist() == values.tolist() and label == 1


@pytest.mark.parametrize(("dtype", "tolerance"), [(np.int16, 1e-4), (np.int32, 1e-7), (np.float32, 1e-7)])
def test_formats_give_the_same_sound(tmp_path, dtype, tolerance):
    expected = 0.5 * tone(32, 440)
    write(tmp_path / "0.wav", expected, dtype=dtype)
    np.testing.assert_allclose(rows(tmp_path, labels=None)[0][:, 0], expected, atol=tolerance)


def test_eight_bits_have_their_zero_at_128(tmp_path):
    wavfile.write(tmp_path / "0.wav", RATE, np.array([0, 128, 192], np.uint8))
    assert rows(tmp_path, labels=None)[0].tolist() == [[-1.0], [0.0], [0.5]]


def test_channels_stay_apart(tmp_path):
    write(tmp_path / "0.wav", np.stack([tone(8, 440), np.zeros(8)], 1))
    sound = rows(tmp_path, labels=None)[0]
    assert sound.shape == (8, 2) and not sound[:, 1].any() and sound[:, 0].any()


def test_a_length_cuts_and_fills(tmp_path):
    for name, samples in (("long", 10), ("short", 3)):
        write(tmp_path / f"{name}.wav", np.full(samples, 0.5))
    sounds = rows(tmp_path, labels=None, output_sequence_length=5)
    assert sounds[0][:, 0].tolist() == [0.5] * 5
    assert sounds[1][:, 0].tolist() == [0.5] * 3 + [0.0] * 2


def test_sounds_are_resampled_before_they_are_cut(tmp_path):
    write(tmp_path / "slow.wav", 0.5 * tone(800, 100, 8000), rate=8000)
    write(tmp_path / "fast.wav", 0.5 * tone(1600, 100, 16000), rate=16000)
    sounds = rows(tmp_path, labels=None, sampling_rate=8000)
    fast, slow = sounds[0][:, 0], sounds[1][:, 0]
    assert fast.dtype == np.float32
    np.testing.assert_allclose(fast[50:-50], slow[50:-50], atol=2e-3)
    assert rows(tmp_path, labels=None, sampling_rate=8000, output_sequence_length=100)[0].shape == (100, 1)


def test_sounds_of_several_lengths_are_refused_by_file(folder):
    write(folder / "low" / "1.wav", tone(70, 100))
    sounds = rows(folder)
    with pytest.raises(ValueError, match=r"one length.*`output_sequence_length=`, such as 70.*\(70, 1\) of "
                                         r".*1\.wav', and \(64, 1\) of .*0\.wav'"):
        [sounds[number] for number in range(8)]


def test_sounds_of_several_rates_are_refused_by_file(folder):
    write(folder / "low" / "1.wav", tone(64, 100), rate=16000)
    sounds = rows(folder)
    with pytest.raises(ValueError, match=r"one sampling rate.*16000.*1\.wav', and 8000 in .*`sampling_rate=8000`"):
        [sounds[number] for number in range(8)]


def test_training_and_validation_have_one_rate(folder):
    write(folder / "low" / "3.wav", tone(64, 100), rate=16000)
    training, validation = audio_dataset_from_directory(folder, shuffle=False, verbose=False, validation_split=0.125,
                                                        subset="both")
    assert len([training.rows[number] for number in range(7)]) == 7
    with pytest.raises(ValueError, match=r"one sampling rate.*16000.*3\.wav', and 8000"):
        validation.rows[0]


def test_a_dataset_can_be_sent_to_another_process(folder):
    dataset = audio_dataset_from_directory(folder, shuffle=False, verbose=False)
    (x, y), (expected, labels) = next(iter(cloudpickle.loads(cloudpickle.dumps(dataset)))), next(iter(dataset))
    assert (x == expected).all() and (y == labels).all()


@pytest.mark.parametrize("damage", ["cut", "rate"])
def test_a_damaged_sound_is_named(folder, damage):
    path = folder / "low" / "1.wav"
    content = path.read_bytes()
    path.write_bytes(content[:100] if damage == "cut" else content[:24] + bytes(8) + content[32:])
    expected = "it ends after 100 of 172 bytes" if damage == "cut" else "it has 0 samples per second"
    with pytest.raises(ValueError, match=rf"The sound .*1\.wav' cannot be read: ValueError: {expected}\. Delete it"):
        rows(folder, sampling_rate=4000)[5]


def test_the_size_of_a_file_that_was_written_as_a_stream_is_not_known(folder):
    path = folder / "low" / "1.wav"
    content = path.read_bytes()
    path.write_bytes(content[:4] + b"\xff" * 4 + content[8:])
    with pytest.warns(wavfile.WavFileWarning, match="EOF"):
        assert rows(folder)[5][0].shape == (64, 1)


def test_sounds_of_several_channels_are_refused_by_file(folder):
    write(folder / "low" / "1.wav", np.zeros((64, 2)))
    sounds = rows(folder)
    with pytest.raises(ValueError, match=r"one number of channels: convert the files.*\(64, 2\) of"):
        [sounds[number] for number in range(8)]


def test_an_empty_sound_is_silence(tmp_path):
    write(tmp_path / "0.wav", np.zeros(0))
    assert not rows(tmp_path, labels=None, output_sequence_length=4)[0].any()


@pytest.mark.parametrize("content", [b"", b"no sound", b"RIFF\x00\x00\x00\x00WAVE"])
def test_a_file_that_is_no_sound_is_named_in_fit(folder, content):
    (folder / "low" / "1.wav").write_bytes(content)
    model = trainer.Sequential([lambda x: x.mean(1), nn.Dense(2)])
    model.compile("sgd", trainer.losses.SparseCategoricalCrossentropy(from_logits=True))
    with pytest.raises(ValueError, match=r"The sound .*1\.wav' cannot be read.*Delete it, or write it as WAV"):
        model.fit(audio_dataset_from_directory(folder, verbose=False), verbose=0)


@pytest.mark.parametrize(("arguments", "error", "message"), [
    ({"ragged": True}, ValueError, "`ragged=True` is for ragged tensors.*`output_sequence_length=`"),
    ({"sampling_rate": 0}, ValueError, "`sampling_rate` must be"),
    ({"sampling_rate": 8000.0}, TypeError, "`sampling_rate` must be"),
    ({"output_sequence_length": -1}, ValueError, "`output_sequence_length` must be"),
    ({"label_mode": "ints"}, ValueError, "Unknown label_mode"),
])
def test_arguments_that_do_not_fit_are_refused(folder, arguments, error, message):
    with pytest.raises(error, match=message):
        audio_dataset_from_directory(folder, verbose=False, **arguments)

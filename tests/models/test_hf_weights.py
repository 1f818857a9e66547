"""Files of Hugging Face's `transformers`: they give its outputs here, and ours give them there."""

import json
import pathlib
import shutil
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import trainer
from tests.support import hf_models, project_files
from trainer import models
from trainer.models.weights.safetensors_files import FileArray

FILES = pathlib.Path(__file__).parent / "hf"


def built(module, x, **options):
    model = trainer.Model(module)
    if options:
        model.compile(**options)
    model.build(x[:1])
    return model


def loaded(name, folder=None, **attributes):
    folder = folder or FILES / name
    model = built(models.from_hf(folder, **attributes), hf_models.inputs(name))
    models.load_hf_weights(model, folder)
    return model


def arrays(folder):
    return {name: array for path in sorted(folder.glob("*.safetensors")) for name, array in load_file(path).items()}


def copied(name, tmp_path):
    return pathlib.Path(shutil.copytree(FILES / name, tmp_path / name))


def rewritten(folder, change):
    """Changes the configuration in a folder."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    change(config)
    path.write_text(json.dumps(config))
    return folder


# --- numbers ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.every_case
@pytest.mark.parametrize("name", hf_models.CASES)
def test_outputs_are_those_of_transformers_and_saved_files_have_the_same_arrays(tmp_path, name):
    model, expected = loaded(name), np.load(FILES / name / "outputs.npy")
    np.testing.assert_allclose(model.predict(hf_models.inputs(name), verbose=0), expected, atol=1e-4, rtol=0)
    models.save_hf_weights(model, tmp_path / "saved", max_file_bytes=3000)
    saved, original = arrays(tmp_path / "saved"), arrays(FILES / name)
    assert len(list((tmp_path / "saved").glob("*.safetensors"))) > 1
    assert saved.keys() == original.keys()
    for key, array in original.items():
        np.testing.assert_array_equal(saved[key], array, err_msg=key)
    again = loaded(name, tmp_path / "saved")
    np.testing.assert_array_equal(again.predict(hf_models.inputs(name), verbose=0),
                                  model.predict(hf_models.inputs(name), verbose=0))


@pytest.mark.slow
@pytest.mark.every_case
@pytest.mark.parametrize("name", hf_models.CASES)
def test_outputs_are_those_of_the_installed_transformers_both_ways(tmp_path, monkeypatch, name):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))  # which torch sets otherwise
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    original = hf_models.made(name)
    original.save_pretrained(tmp_path / "theirs", max_shard_size=hf_models.CASES[name][2])
    model, expected = loaded(name, tmp_path / "theirs"), hf_models.outputs(original, name)
    np.testing.assert_allclose(model.predict(hf_models.inputs(name), verbose=0), expected, atol=1e-4, rtol=0)
    models.save_hf_weights(model, tmp_path / "ours", max_file_bytes=4000)
    found, report = hf_models.read_by_transformers(tmp_path / "ours", name)
    np.testing.assert_allclose(found, expected, atol=1e-5, rtol=0)
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))


@pytest.mark.slow
def test_a_language_model_continues_with_its_cache_as_without():
    model, prompt = loaded("llama3"), hf_models.inputs("llama3")[:, :6]
    found, expected = models.generate(model, prompt, 12, temperature=0), prompt
    for _ in range(12):
        logits = model.module.apply({"params": model.state.params}, expected)[:, -1]
        expected = np.concatenate([expected, np.asarray(logits).argmax(-1)[:, None]], axis=1)
    np.testing.assert_array_equal(found, expected)


@pytest.mark.slow
@pytest.mark.every_case
@pytest.mark.parametrize("strategy", [
    lambda: trainer.distribute.MirroredStrategy([f"cpu:{number}" for number in range(4)]),
    lambda: trainer.distribute.FullyShardedStrategy([f"cpu:{number}" for number in range(4)]),
    lambda: trainer.distribute.ModelParallelStrategy(
        {"replica": 2, "model": 2}, [f"cpu:{number}" for number in range(4)],
        models.layout_map(models.from_hf(FILES / "llama2"))),
], ids=["mirrored", "fully sharded", "model parallel"])
def test_each_device_reads_its_part_and_trains_as_one_device(strategy, monkeypatch):
    x = hf_models.inputs("llama2")
    results, parts = [], []
    read = FileArray.read
    for scope in (trainer.distribute.OneDeviceStrategy, strategy):
        parts.clear()
        monkeypatch.setattr(FileArray, "read",
                            lambda array, index: parts.append(part := read(array, index)) or part)
        with scope().scope():
            model = built(models.from_hf(FILES / "llama2"), x, optimizer=trainer.optimizers.SGD(0.1),
                          loss=trainer.losses.SparseCategoricalCrossentropy(from_logits=True))
            models.load_hf_weights(model, FILES / "llama2")
        np.testing.assert_allclose(model.predict(x, verbose=0), np.load(FILES / "llama2" / "outputs.npy"), atol=1e-4)
        for _ in range(2):
            model.train_on_batch(x[:, :-1], x[:, 1:])
        results.append(model.get_weights())
    for one, several in zip(*results, strict=True):
        np.testing.assert_allclose(one, several, atol=1e-5)
    total = sum(array.size for array in arrays(FILES / "llama2").values())
    assert sum(part.size for part in parts) == total, "no part is read twice"


# --- dtypes -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_dtypes_are_kept_or_cast(tmp_path):
    model = loaded("gpt2")
    models.save_hf_weights(model, tmp_path / "half", dtype="bfloat16")
    kept = loaded("gpt2", tmp_path / "half", param_dtype="auto")
    cast = loaded("gpt2", tmp_path / "half")
    for before, narrow, wide in zip(*(jax.tree.leaves(each.state.params) for each in (model, kept, cast)), strict=True):
        assert (narrow.dtype, wide.dtype) == (jnp.bfloat16, jnp.float32)
        np.testing.assert_array_equal(before.astype(jnp.bfloat16), narrow)
        np.testing.assert_array_equal(narrow.astype(jnp.float32), wide)
    models.save_hf_weights(kept, tmp_path / "again")
    assert {array.dtype.name for array in arrays(tmp_path / "again").values()} == {"bfloat16"}
    assert len({path.stat().st_mode for path in (tmp_path / "again").iterdir()}) == 1, "other users may read all files"
    assert json.loads((tmp_path / "again" / "config.json").read_text())["dtype"] == "bfloat16"


@pytest.mark.slow
def test_numbers_that_a_dtype_cannot_hold_are_refused(tmp_path):
    model = loaded("gpt2")
    large = [100000 * weight for weight in model.get_weights()]
    model.set_weights(large)
    with pytest.raises(ValueError, match=r"'transformer.wte.weight' has numbers that are too large for float16"):
        models.save_hf_weights(model, tmp_path / "half", dtype="float16")
    models.save_hf_weights(model, tmp_path / "single")
    narrow = built(models.from_hf(FILES / "gpt2", param_dtype=jnp.float16), hf_models.inputs("gpt2"))
    before = narrow.get_weights()
    with pytest.raises(ValueError, match="has numbers that are too large for the model's float16"):
        models.load_hf_weights(narrow, tmp_path / "single")
    jax.tree.map(np.testing.assert_array_equal, narrow.get_weights(), before)


# --- names ------------------------------------------------------------------------------------------------------------


def changed(name, tmp_path, change):
    """Returns a folder whose arrays are changed, in one file."""
    folder = copied(name, tmp_path)
    found = arrays(folder)
    for path in [*folder.glob("*.safetensors"), *folder.glob("*.index.json")]:
        path.unlink()
    change(found)
    save_file(found, folder / "model.safetensors")
    return folder


@pytest.mark.slow
def test_buffers_other_prefixes_and_old_names_are_known(tmp_path):
    def older(found):
        for name in list(found):
            found[name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta")
                  .removeprefix("bert.")] = found.pop(name)
        found["embeddings.position_ids"] = np.arange(16)[None]

    folder = changed("bert_classifier", tmp_path, older)
    found = loaded("bert_classifier", folder).predict(hf_models.inputs("bert_classifier"), verbose=0)
    np.testing.assert_allclose(found, np.load(folder / "outputs.npy"), atol=1e-4)


@pytest.mark.slow
@pytest.mark.every_case
@pytest.mark.parametrize(("name", "change", "message"), [
    ("llama2", lambda found: [found.pop(name) for name in list(found) if "mlp.up_proj" in name],
     r"2 arrays are not in the file: layers\.\*\.mlp\.up_proj\.weight \(2\)\. Make the module with `models.from_hf"),
    ("gpt2", lambda found: found.update({f"transformer.{kind}.weight": np.zeros(2, np.float32) for kind in "ab"}),
     r"2 arrays of the file are not in the model: transformer\.a\.weight, transformer\.b\.weight"),
    ("gpt2", lambda found: found.update({"transformer.h.1.attn.c_attn.bias": np.zeros(23, np.float32)}),
     r"1 array has another shape: transformer\.h\.1\.attn\.c_attn\.bias \(file: \(23,\), model: \(24,\)\)"),
    ("bert", lambda found: found.update({"cls.predictions.bias": np.zeros(20, np.float32)}),
     r"cls\.predictions\.bias.*`skip_head=True` leaves the layers after the body"),
    ("gpt2", lambda found: found.update({"transformer.wte.weight": np.zeros((20, 8), np.int8)}),
     r"not floating-point numbers of 16 bits or more: transformer\.wte\.weight \(I8\).*Quantized"),
    ("llama3", lambda found: found.update({"lm_head.weight": found["model.embed_tokens.weight"] + 1}),
     r"'lm_head.weight', other than the table of its tokens.*`tied_embedding=False`"),
], ids=["missing", "unused", "shape", "head", "quantized", "untied"])
def test_arrays_that_do_not_fit_are_named_and_change_nothing(tmp_path, name, change, message):
    folder = changed(name, tmp_path, change)
    model = built(models.from_hf(folder), hf_models.inputs(name))
    before = model.get_weights()
    with pytest.raises(ValueError, match=message):
        models.load_hf_weights(model, folder)
    jax.tree.map(np.testing.assert_array_equal, model.get_weights(), before)


@pytest.mark.slow
def test_an_output_layer_that_equals_the_table_is_the_table(tmp_path):
    folder = changed("llama3", tmp_path, lambda found: found.update(
        {"lm_head.weight": found["model.embed_tokens.weight"].copy()}))
    found = loaded("llama3", folder).predict(hf_models.inputs("llama3"), verbose=0)
    np.testing.assert_allclose(found, np.load(folder / "outputs.npy"), atol=1e-4)


@pytest.mark.slow
def test_heads_are_skipped_on_request():
    x = hf_models.inputs("bert")
    body = models.from_hf(FILES / "bert")
    model = built(body.clone(include_top=True, num_classes=5), x)
    head = jax.tree.map(np.asarray, model.state.params["predictions"])
    models.load_hf_weights(model, FILES / "bert_classifier", skip_head=True)  # of three classes
    jax.tree.map(np.testing.assert_array_equal, model.state.params["predictions"], head)
    expected = arrays(FILES / "bert_classifier")
    np.testing.assert_array_equal(model.state.params["pooler"]["kernel"], expected["bert.pooler.dense.weight"].T)
    features = built(body.clone(pooling=None), x)
    models.load_hf_weights(features, FILES / "bert", skip_head=True)
    np.testing.assert_allclose(
        np.tanh(features.predict(x, verbose=0)[:, 0] @ arrays(FILES / "bert")["pooler.dense.weight"].T
                + arrays(FILES / "bert")["pooler.dense.bias"]), np.load(FILES / "bert" / "outputs.npy"), atol=1e-4)


# --- configurations ---------------------------------------------------------------------------------------------------


def older_rope(config):
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope.pop("rope_theta")
    config["rope_scaling"] = rope
    config["torch_dtype"] = config.pop("dtype")


def test_configurations_of_older_versions_mean_the_same(tmp_path):
    assert models.from_hf(rewritten(copied("llama3", tmp_path), older_rope)) == models.from_hf(FILES / "llama3")
    plain = rewritten(copied("llama2", tmp_path), lambda config: config.pop("rope_parameters"))
    assert models.from_hf(plain) == models.from_hf(FILES / "llama2")


@pytest.mark.parametrize(("name", "changes", "message"), [
    ("gpt2", {"model_type": "gpt_neox"}, r"`model_type` 'gpt_neox'\. Expected: one of 'gpt2', 'llama', 'bert', 'vit'"),
    ("gpt2", {"activation_function": "relu"}, r"activation_function='relu'.*Expected: 'gelu_new'"),
    ("llama2", {"attention_bias": True}, r"attention_bias=True, which the module does not support\. Expected: False"),
    ("llama2", {"head_dim": 16}, r"head_dim=16.*`hidden_size / num_attention_heads`"),
    ("llama2", {"rope_parameters": {"rope_type": "yarn"}}, r"rope_type='yarn'.*'default' or 'llama3'"),
    ("llama2", {"rope_parameters": {"rope_type": "llama3"}}, r"malformed \(KeyError: 'factor'\)"),
    ("bert", {"is_decoder": True}, r"is_decoder=True"),
], ids=lambda value: "-".join(value) if isinstance(value, dict) else None)
def test_configurations_with_another_meaning_are_refused(tmp_path, name, changes, message):
    folder = rewritten(copied(name, tmp_path), lambda config: config.update(changes))
    with pytest.raises(ValueError, match=message):
        models.from_hf(folder)


@pytest.mark.slow
@pytest.mark.every_case
@pytest.mark.parametrize(("name", "attributes", "message"), [
    ("llama3", {"num_heads": 2, "num_kv_heads": 1}, r"num_heads=4 \(the model's is 2\)"),
    ("llama3", {"rope_theta": 10000.0, "rope_scaling": None},
     r"rope_theta=500.0 \(the model's is 10000.0\), rope_scaling=Llama3Scaling\(.*\(the model's is None\)"),
    ("vit_tokens", {"layer_norm_epsilon": 1e-6}, r"layer_norm_epsilon=0.01.*`models.from_hf\(folder\)`"),
])
def test_attributes_that_no_shape_shows_are_compared(name, attributes, message):
    model = built(models.from_hf(FILES / name, **attributes), hf_models.inputs(name))
    with pytest.raises(ValueError, match=message):
        models.load_hf_weights(model, FILES / name)


# --- files ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def llama():
    return loaded("llama2")


def index_outside(folder):
    path = folder / "model.safetensors.index.json"
    path.write_text(path.read_text().replace("model-00001", "../model-00001"))


def without_arrays(folder):
    save_file({"a": np.zeros(2)}, folder / "model-00002-of-00002.safetensors")


def pickled(folder):
    for path in folder.glob("*.safetensors*"):
        path.unlink()
    (folder / "pytorch_model.bin").write_bytes(b"PK")


@pytest.mark.slow
@pytest.mark.every_case
@pytest.mark.parametrize(("damage", "error", "message"), [
    (index_outside, ValueError, r"'\.\./model-00001-of-00002\.safetensors', which is outside of its folder"),
    (without_arrays, ValueError, r"names \d+ arrays that its files do not have, such as"),
    (lambda folder: (folder / "model.safetensors.index.json").write_text("{}"), ValueError, "is malformed"),
    (pickled, ValueError, r"pickle of `torch.save`.*save_pretrained"),
    (lambda folder: [path.unlink() for path in folder.glob("*.safetensors*")], FileNotFoundError, "has neither"),
    (lambda folder: (folder / "model-00001-of-00002.safetensors").write_bytes(b"12345678" * 9), ValueError,
     "is no safetensors file, or is damaged"),
], ids=["outside", "lost", "index", "pickle", "nothing", "damaged"])
def test_damaged_folders_are_refused(tmp_path, llama, damage, error, message):
    folder = copied("llama2", tmp_path)
    damage(folder)
    with pytest.raises(error, match=message):
        models.load_hf_weights(llama, folder)


@pytest.mark.slow
def test_a_file_and_an_index_are_read_without_their_folder():
    model = built(models.from_hf(FILES / "llama2" / "config.json"), hf_models.inputs("llama2"))
    models.load_hf_weights(model, FILES / "llama2" / "model.safetensors.index.json")
    np.testing.assert_array_equal(model.state.params["head"]["embedding"], arrays(FILES / "llama2")["lm_head.weight"])
    model = loaded("gpt2")
    models.load_hf_weights(model, FILES / "gpt2" / "model.safetensors")


def test_a_missing_folder_says_where_folders_come_from(tmp_path, llama):
    for call in (models.from_hf, lambda folder: models.load_hf_weights(llama, folder)):
        with pytest.raises(FileNotFoundError, match=r"no '.*Llama-3.2-1B', and nothing is downloaded.*save_pre"):
            call(tmp_path / "meta-llama" / "Llama-3.2-1B")
    with pytest.raises(FileNotFoundError, match=r"There is no '.*config.json', and nothing is downloaded"):
        models.from_hf(tmp_path)


@pytest.mark.parametrize(("dtype", "error", "message"), [
    ("int8", ValueError, r"must be one of 'float64', 'float32', 'float16', 'bfloat16'\. Received: 'int8'"),
    ("float8_e4m3fn", ValueError, r"must be one of .*Received: 'float8_e4m3fn'"),
    ("bf16", TypeError, r"must be a dtype.*Received: 'bf16'")])
def test_weights_are_kept_in_floating_point(tmp_path, llama, dtype, error, message):
    with pytest.raises(error, match="`dtype` " + message):
        models.save_hf_weights(llama, tmp_path / "saved", dtype=dtype)
    assert not (tmp_path / "saved").exists()
    with pytest.raises(error, match="`param_dtype` " + message):
        models.from_hf(FILES / "llama2", param_dtype=dtype)


def test_adapters_are_told_to_be_merged(tmp_path, llama):
    adapted = trainer.lora(llama, rank=1, targets=["query"])
    for call in (models.save_hf_weights, models.load_hf_weights):
        with pytest.raises(ValueError, match=r"query/lora_a.*adapters of LoRA: save `model.merge\(\)`, and load"):
            call(adapted, FILES / "llama2" if call is models.load_hf_weights else tmp_path / "saved")


def test_weights_are_never_replaced_by_a_save(tmp_path, llama):
    folder = copied("llama2", tmp_path)
    with pytest.raises(FileExistsError, match=r"has weights already, such as 'model-00001-of-00002.safetensors'"):
        models.save_hf_weights(llama, folder)
    assert sorted(path.name for path in folder.iterdir()) == sorted(path.name for path in (FILES / "llama2").iterdir())


@pytest.mark.slow
def test_saved_files_have_the_averages_that_predict_uses(tmp_path):
    model, tokens = loaded("gpt2"), hf_models.inputs("gpt2")
    model.compile("adam", trainer.losses.SparseCategoricalCrossentropy(from_logits=True), ema_decay=0.9)
    model.fit(tokens, tokens, epochs=3, verbose=0)
    models.save_hf_weights(model, tmp_path / "saved")
    other = built(models.from_hf(tmp_path / "saved"), tokens)
    models.load_hf_weights(other, tmp_path / "saved")
    np.testing.assert_allclose(other.predict(tokens, verbose=0), model.predict(tokens, verbose=0), rtol=1e-5, atol=1e-5)
    assert np.abs(np.asarray(model(tokens)) - other(tokens)).max() > 1e-3


@pytest.mark.slow
def test_models_of_no_family_are_refused(tmp_path):
    model = built(models.MLP(num_classes=2), np.zeros((1, 3), np.float32))
    for call in (models.load_hf_weights, models.save_hf_weights):
        with pytest.raises(TypeError, match=r"TransformerLM, Llama, TransformerEncoder, ViT. Received: a model of MLP"):
            call(model, tmp_path / "none")
    with pytest.raises(RuntimeError, match="is not built"):
        models.load_hf_weights(trainer.Model(models.from_hf(FILES / "gpt2")), FILES / "gpt2")


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_load_needs_host_memory_for_an_array_and_not_for_the_model(tmp_path):
    def run(*arguments):
        done = subprocess.run([sys.executable, "-m", "tests.support.load_of_hf_weights", *arguments], text=True,
                              capture_output=True, cwd=project_files.ROOT, timeout=300)
        assert done.returncode == 0, done.stderr
        return done.stdout

    run(str(tmp_path), "--make", "240", "60")
    assert len(list(tmp_path.glob("*.safetensors"))) >= 4
    assert float(run(str(tmp_path))) < 60 + 60  # of 240 MB; the largest array has 17 MB

"""Flax modules to train: published architectures, named as in `keras.applications`.

The modules are plain Linen modules. They do not depend on the trainer and work with any Flax training loop.
"""

from trainer.core.calls.public_names import attach_stub

# Names of `keras.applications`, `keras.models` and Hugging Face: the sentences that end their errors.
_MISSING = {
    **dict.fromkeys(
        ("convnext", "densenet", "efficientnet", "inception_v3", "mobilenet", "mobilenet_v2", "mobilenet_v3", "resnet",
         "resnet50", "resnet_v2", "vgg16", "vgg19", "xception"),
        "Its classes are in `trainer.models`, and `models.preprocess_input(images, \"ResNet50\")` serves all models."),
    **dict.fromkeys(("BERT", "Bert", "RoBERTa", "DistilBERT"),
                    "Instead: `TransformerEncoder`; or `models.from_hf(folder)`, a folder of Hugging Face with BERT."),
    **dict.fromkeys(("GPT", "GPT2"),
                    "Instead: `TransformerLM`; or `models.from_hf(folder)`, a folder of Hugging Face with GPT-2."),
    **dict.fromkeys(("AutoModel", "AutoModelForCausalLM"), "Instead: `trainer.models.from_hf(folder)`."),
    **dict.fromkeys(("LSTM", "GRU", "RNN", "T5", "Transformer"), "Write a Flax module, with the layers of "
                    "`flax.linen`: models here are `TransformerLM`, `TransformerEncoder` and `Llama`."),
    "decode_predictions": "Class names belong to the weights: look `outputs.argmax(-1)` up in their list.",
    "load_model": "Models are loaded by `trainer.load_model(path, model=...)`.",
}

__getattr__, __dir__, __all__ = attach_stub(__name__, missing=_MISSING)

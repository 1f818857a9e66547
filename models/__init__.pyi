from trainer.models.generative.dcgan import DCGANDiscriminator as DCGANDiscriminator, DCGANGenerator as DCGANGenerator
from trainer.models.generative.vae import VAE as VAE
from trainer.models.layouts import layout_map as layout_map
from trainer.models.mlp import MLP as MLP
from trainer.models.text.generation import generate as generate
from trainer.models.text.llama import (
    Llama as Llama,
    Llama2_7B as Llama2_7B,
    Llama3Scaling as Llama3Scaling,
    Llama31_8B as Llama31_8B,
    Llama32_1B as Llama32_1B,
)
from trainer.models.text.transformer_encoder import TransformerEncoder as TransformerEncoder
from trainer.models.text.transformer_lm import TransformerLM as TransformerLM
from trainer.models.vision.cnn import CNN as CNN
from trainer.models.vision.convnext import (
    ConvNeXtBase as ConvNeXtBase,
    ConvNeXtLarge as ConvNeXtLarge,
    ConvNeXtSmall as ConvNeXtSmall,
    ConvNeXtTiny as ConvNeXtTiny,
)
from trainer.models.vision.densenet import (
    DenseNet121 as DenseNet121,
    DenseNet169 as DenseNet169,
    DenseNet201 as DenseNet201,
)
from trainer.models.vision.efficientnet import (
    EfficientNetB0 as EfficientNetB0,
    EfficientNetB1 as EfficientNetB1,
    EfficientNetB2 as EfficientNetB2,
    EfficientNetB3 as EfficientNetB3,
    EfficientNetB4 as EfficientNetB4,
    EfficientNetB5 as EfficientNetB5,
    EfficientNetB6 as EfficientNetB6,
    EfficientNetB7 as EfficientNetB7,
)
from trainer.models.vision.inception_v3 import InceptionV3 as InceptionV3
from trainer.models.vision.mobilenet import MobileNet as MobileNet
from trainer.models.vision.mobilenet_v2 import MobileNetV2 as MobileNetV2
from trainer.models.vision.mobilenet_v3 import (
    MobileNetV3Large as MobileNetV3Large,
    MobileNetV3Small as MobileNetV3Small,
)
from trainer.models.vision.resnet import (
    ResNet18 as ResNet18,
    ResNet34 as ResNet34,
    ResNet50 as ResNet50,
    ResNet101 as ResNet101,
    ResNet152 as ResNet152,
)
from trainer.models.vision.resnet_v2 import (
    ResNet50V2 as ResNet50V2,
    ResNet101V2 as ResNet101V2,
    ResNet152V2 as ResNet152V2,
)
from trainer.models.vision.unet import UNet as UNet
from trainer.models.vision.vgg import VGG16 as VGG16, VGG19 as VGG19
from trainer.models.vision.vit import ViTB16 as ViTB16, ViTB32 as ViTB32, ViTL16 as ViTL16, ViTS16 as ViTS16
from trainer.models.vision.xception import Xception as Xception
from trainer.models.weights.hf_config import from_hf as from_hf
from trainer.models.weights.hf_weights import load_hf_weights as load_hf_weights, save_hf_weights as save_hf_weights
from trainer.models.weights.keras_weights import load_keras_weights as load_keras_weights
from trainer.models.weights.preprocessing import preprocess_input as preprocess_input
from trainer.models.weights.torch_weights import load_torch_weights as load_torch_weights

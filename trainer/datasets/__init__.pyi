from trainer.datasets.images import (
    cifar10 as cifar10,
    cifar100 as cifar100,
    fashion_mnist as fashion_mnist,
    mnist as mnist,
)
from trainer.datasets.tables import (
    boston_housing as boston_housing,
    breast_cancer as breast_cancer,
    california_housing as california_housing,
    diabetes as diabetes,
    digits as digits,
    iris as iris,
    wine as wine,
)
from trainer.datasets.texts import imdb as imdb, reuters as reuters

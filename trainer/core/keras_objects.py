"""Detection of Keras's objects, without an import of Keras."""

from __future__ import annotations

_PACKAGES = ("keras", "tf_keras", "tensorflow")


def keras_class(value: object, name: str | None = None) -> type | None:
    """Returns the first class of Keras among the classes of an object, or the bases of a class; None if there is none.

    Args:
      value: the object or the class.
      name: the name that the class must have, such as "Metric"; any by default.

    >>> keras_class(3)
    """
    classes = (value if isinstance(value, type) else type(value)).__mro__
    return next((cls for cls in classes
                 if cls.__module__.partition(".")[0] in _PACKAGES and name in (None, cls.__name__)), None)

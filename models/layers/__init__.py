"""What several families of models share: convolutions as Keras has them, heads, attention."""

"""What binds Keras to a strategy. The only package that touches Keras' internals."""

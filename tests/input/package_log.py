"""Collects the warnings of replicax, also in processes without pytest."""

import logging


class PackageLog(logging.Handler):
    """A handler whose `messages` are the package's warnings so far."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []
        logging.getLogger("replicax").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        if record.module != "wraps":  # This one warns of an untested version of Keras.
            self.messages.append(record.getMessage())

    def pop(self) -> list[str]:
        """Return the messages, and forget them."""
        messages, self.messages = self.messages, []
        return messages

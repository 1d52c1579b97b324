"""The root of the project's errors, and those of the store. The whole tree is drawn in `twinkle_core.errors`."""


class TwinkleError(Exception):
    """Root of every error raised on purpose."""


class StorageError(TwinkleError, OSError):
    """The store cannot be used as asked."""

    def __str__(self) -> str:  # OSError would print a tuple where two arguments are given
        return str(self.args[0]) if self.args else ""


class NotFoundError(StorageError, FileNotFoundError):
    """No object under this key."""


class DamagedError(StorageError):
    """Stored bytes are not what the record promises: missing, short or changed."""


class FencedError(TwinkleError):
    """A newer attempt owns this work; the caller must stop and commit nothing."""

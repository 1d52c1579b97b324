"""Every error the project raises on purpose.

    TwinkleError
    ├── ConfigError (ValueError)        a setting is wrong: key, value, what to do
    ├── DataError (ValueError)          a row, file or model input is wrong: file, row, reason
    ├── StorageError (OSError)          the store cannot be used as asked
    │   ├── NotFoundError (FileNotFoundError)
    │   └── DamagedError                bytes are not what the record says
    ├── FencedError                     a newer attempt owns this work: stop, commit nothing
    ├── TrainingError (RuntimeError)    training cannot go on and a retry would not help (NaN, CUDA OOM)
    ├── WorkerLostError (RuntimeError)  an actor, node or process died: rebuild the group, resume
    └── GateError                       the evaluation report does not allow a release

Each message says what is wrong, which value, and what to do. All pickle, since they cross process borders.
The storage branch is defined in `storage.errors` (storage knows nothing of this package) and listed here.
"""

from storage.errors import DamagedError, FencedError, NotFoundError, StorageError, TwinkleError


class ConfigError(TwinkleError, ValueError):
    """A setting is wrong. Raised before anything heavy starts."""


class DataError(TwinkleError, ValueError):
    """A row, a file or a model input is wrong."""


class TrainingError(TwinkleError, RuntimeError):
    """Training cannot go on, and doing the same again would end the same way."""


class WorkerLostError(TwinkleError, RuntimeError):
    """A worker died through no fault of the job; the group is to be rebuilt and resumed."""


class GateError(TwinkleError):
    """The report does not pass the release gate."""


__all__ = [
    "ConfigError",
    "DamagedError",
    "DataError",
    "FencedError",
    "GateError",
    "NotFoundError",
    "StorageError",
    "TrainingError",
    "TwinkleError",
    "WorkerLostError",
]

"""Each message says where, why, and what to do."""


class DpshardError(Exception):
    """Base class of every error of the package."""


class ConfigurationError(DpshardError, ValueError):
    """A setting is out of range, or two contradict each other."""


class UnsupportedParameterError(DpshardError, RuntimeError):
    """A trainable parameter is used without an exact per-sample gradient rule."""


class BatchLayoutError(DpshardError, RuntimeError):
    """The dimension of the samples is ambiguous."""


class VerificationError(DpshardError, RuntimeError):
    """The gradient of a sample depends on other samples, or differs from plain autograd."""


class LogicalBatchError(DpshardError, RuntimeError):
    """A forward, backward or step would break the accounting of the logical batch."""


class UnknownLengthError(LogicalBatchError, TypeError):
    """The length of a logical batch is private data; list() and tqdm continue without it after a TypeError."""


class UnsupportedOptimizerError(DpshardError, RuntimeError):
    """The optimizer or its scaler would use other gradients than the accounted ones."""


class EngineInUseError(DpshardError, RuntimeError):
    """The model belongs to another engine, or the engine to another process."""


class BudgetExceededError(DpshardError, RuntimeError):
    """The next step would exceed the target epsilon."""


class AccountingError(DpshardError, RuntimeError):
    """The accountant cannot analyse the mechanism."""


class CheckpointError(DpshardError, RuntimeError):
    """A saved state is damaged, incomplete, or of another mechanism."""


class DataError(DpshardError, ValueError):
    """A data set is empty, of the wrong size, or cannot be read."""


class RunFolderError(DpshardError, OSError):
    """A run folder cannot be written, read, or resumed."""


REENTRANT = (
    "Reentrant activation checkpointing differentiates each segment separately, so the norm of a whole sample is never "
    "known. Pass use_reentrant=False to torch.utils.checkpoint (in transformers: "
    'gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})).'
)

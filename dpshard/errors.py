"""Every error that dpshard raises on purpose. Each message says where, why, and what to do about it."""


class DpshardError(Exception):
    """Base class: `except DpshardError` catches what the package refuses, and nothing else."""


class ConfigurationError(DpshardError, ValueError):
    """A setting is out of its range, or two settings contradict each other."""


class UnsupportedParameterError(DpshardError, RuntimeError):
    """A trainable parameter is used in a way for which no exact per-sample gradient rule exists."""


class BatchLayoutError(DpshardError, RuntimeError):
    """It is not evident which dimension of a tensor carries the samples of the micro-batch."""


class VerificationError(DpshardError, RuntimeError):
    """Per-sample gradients of a batch differ from those of its samples taken alone."""


class LogicalBatchError(DpshardError, RuntimeError):
    """A forward, backward or step came at a moment when it would break the accounting of the logical batch."""


class UnknownLengthError(LogicalBatchError, TypeError):
    """The length of a logical batch was asked for, which is data. A TypeError, so that list() and tqdm go on."""


class UnsupportedOptimizerError(DpshardError, RuntimeError):
    """The optimizer (or a scaler around it) would see gradients that are not privatized as accounted."""


class EngineInUseError(DpshardError, RuntimeError):
    """The model already belongs to another engine, or the engine to another process."""


class BudgetExceededError(DpshardError, RuntimeError):
    """The next step would spend more than the target epsilon."""


class AccountingError(DpshardError, RuntimeError):
    """The accountant cannot analyse the mechanism that was asked for."""


class CheckpointError(DpshardError, RuntimeError):
    """A saved state is damaged, incomplete, or belongs to another mechanism."""


class DataError(DpshardError, ValueError):
    """A data set is empty, of the wrong size, or cannot be read."""


class RunFolderError(DpshardError, OSError):
    """A run folder cannot be written, read, or resumed."""


REENTRANT = (
    "Reentrant activation checkpointing differentiates each segment by itself, so the norm of a whole sample "
    "is never known. Pass use_reentrant=False to torch.utils.checkpoint (in transformers: "
    'gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})).'
)
"""Why reentrant checkpointing is refused, and the remedy: the text of every error that refuses it."""

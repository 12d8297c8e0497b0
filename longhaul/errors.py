"""The error tree. Imports nothing of ours.

LonghaulError                         base; a command prints one line, exit code 1
├── ConfigError (ValueError)          bad option; exit code 2
│   └── BudgetError                   budget below the least the model can run with
├── ModelError                        about the GGUF
│   ├── ModelFormatError (ValueError) missing key or tensor, truncated file, shards that disagree
│   │   └── MissingShardError         one of several files is not there
│   └── ModelUnsupportedError         a layout that is not mapped
├── PatchError (RuntimeError)         libraries not built, or of another version
├── NativeError (RuntimeError)        any other native status
│   └── ReadError (OSError)           shard, offset, size, errno
├── DecodeError (RuntimeError)        llama_decode's code
└── TraceError (ValueError)           bad trace file
"""


class LonghaulError(Exception):
    """Anything that longhaul raises on purpose."""


class ConfigError(LonghaulError, ValueError):
    """An option has a value that cannot be used."""


class BudgetError(ConfigError):
    """The budget is below the least that the model can run with; the message says that least."""


class ModelError(LonghaulError):
    """The model file cannot be used."""


class ModelFormatError(ModelError, ValueError):
    """The file is not a whole, well-formed GGUF; the message names file and key."""


class MissingShardError(ModelFormatError):
    """One of a model's files is not there; the message says which."""


class ModelUnsupportedError(ModelError):
    """The model is well-formed but laid out in a way that cannot be streamed."""


class PatchError(LonghaulError, RuntimeError):
    """The native libraries are missing or of another version; the message says how to build."""


class NativeError(LonghaulError, RuntimeError):
    """A native call failed."""


class ReadError(OSError, NativeError):
    """Expert bytes could not be read; the message names shard, offset, size and errno.

    OSError comes first: it is the one that takes errno and message.
    """


class DecodeError(LonghaulError, RuntimeError):
    """A ubatch could not be evaluated."""


class TraceError(LonghaulError, ValueError):
    """A routing trace cannot be read; the message names the line or byte."""

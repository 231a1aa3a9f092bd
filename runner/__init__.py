"""Methods -> text.

>>> from ostinato.runner import Engine
>>> engine = Engine.load("artifact/", cuda_graph=True)
>>> print("".join(engine.generate("What is the capital of France?")))
Paris
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ostinato.delegate.lazy_names import lazy_names

if TYPE_CHECKING:
    from ostinato.delegate.errors import ArtifactError as ArtifactError
    from ostinato.delegate.errors import CapacityError as CapacityError
    from ostinato.delegate.errors import ClosedError as ClosedError
    from ostinato.delegate.errors import DeviceMemoryError as DeviceMemoryError
    from ostinato.delegate.errors import InputError as InputError
    from ostinato.delegate.errors import OptionError as OptionError
    from ostinato.delegate.errors import OstinatoError as OstinatoError
    from ostinato.delegate.errors import SessionFileError as SessionFileError
    from ostinato.delegate.errors import StepError as StepError
    from ostinato.delegate.errors import TargetError as TargetError
    from ostinato.delegate.sampling_params import SamplingParams as SamplingParams
    from ostinato.delegate.sampling_params import SamplingTensors as SamplingTensors
    from ostinato.delegate.sampling_params import TokenLogprobs as TokenLogprobs
    from ostinato.delegate.version import __version__ as __version__

    from .async_engine import AsyncEngine as AsyncEngine
    from .async_engine import AsyncStream as AsyncStream
    from .async_engine import EngineLimits as EngineLimits
    from .async_engine import EngineProcessError as EngineProcessError
    from .conversation import Conversation as Conversation
    from .engine import Engine as Engine
    from .load_bar import LoadBar as LoadBar
    from .scheduler.messages import CancelledError as CancelledError
    from .scheduler.messages import Output as Output
    from .scheduler.messages import QueueFullError as QueueFullError
    from .scheduler.messages import Request as Request
    from .sessions.session import Session as Session
    from .sessions.session import Snapshot as Snapshot
    from .sessions.warm_up import Captured as Captured
    from .sessions.warm_up import WarmUp as WarmUp
    from .stream import Result as Result
    from .stream import Stream as Stream
    from .text.prompts import Prompt as Prompt
    from .text.tokenizer import Message as Message
    from .text.tokenizer import Piece as Piece
    from .text.tokenizer import TextStream as TextStream
    from .text.tokenizer import Tokenizer as Tokenizer
    from .text_request import TextRequest as TextRequest
else:
    __all__, __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "ostinato.delegate.errors": "ArtifactError CapacityError ClosedError DeviceMemoryError InputError "
            "OptionError OstinatoError SessionFileError StepError TargetError",
            "ostinato.delegate.sampling_params": "SamplingParams SamplingTensors TokenLogprobs",
            "ostinato.delegate.version": "__version__",
            ".async_engine": "AsyncEngine AsyncStream EngineLimits EngineProcessError",
            ".conversation": "Conversation",
            ".engine": "Engine",
            ".load_bar": "LoadBar",
            ".scheduler.messages": "CancelledError Output QueueFullError Request",
            ".sessions.session": "Session Snapshot",
            ".sessions.warm_up": "Captured WarmUp",
            ".stream": "Result Stream",
            ".text.prompts": "Prompt",
            ".text.tokenizer": "Message Piece TextStream Tokenizer",
            ".text_request": "TextRequest",
        },
    )

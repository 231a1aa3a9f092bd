"""Methods -> text.

>>> from ostinato.runner import Engine
>>> engine = Engine.load("artifact/", cuda_graph=True)
>>> print("".join(engine.generate("What is the capital of France?")))
Paris
"""

from ostinato.delegate.sampling import Sampling

from .engine import Engine, Result
from .load_bar import LoadBar
from .sessions.warm_up import Captured, WarmUp
from .text.tokenizer import Tokenizer

__all__ = ["Captured", "Engine", "LoadBar", "Result", "Sampling", "Tokenizer", "WarmUp"]

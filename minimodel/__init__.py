"""The decoder package: a compact Qwen2.5 in plain PyTorch, its checkpoint format and its numeric contract."""

from minimodel.config import ModelConfig
from minimodel.decoder import Decoder
from minimodel.errors import InputError
from minimodel.load import load_model
from minimodel.numerics import NumericContract

__all__ = ["Decoder", "InputError", "ModelConfig", "NumericContract", "load_model"]

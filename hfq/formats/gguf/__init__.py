"""Formats of the tensors in GGUF files."""

from hfq.formats.gguf import block_rows as block_rows
from hfq.formats.gguf import gptqmodel_rows as gptqmodel_rows
from hfq.formats.gguf import key_value as key_value

"""Formats of MLX (mlx-lm)."""

from hfq.formats.mlx import affine as affine
from hfq.formats.mlx import float_modes as float_modes

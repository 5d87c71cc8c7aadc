"""Formats of NVIDIA ModelOpt."""

from hfq.formats.modelopt import experts as experts
from hfq.formats.modelopt import linear as linear

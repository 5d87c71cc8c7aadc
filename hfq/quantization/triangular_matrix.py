"""Lower half of a symmetric or triangular matrix, with half of the memory and work.

The matrix is stored in panels of rows. Each panel is as wide as its last row is long. Besides the matrix,
every operation needs memory for only a few panels.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from hfq.quantization.malloc_trim import trim_heap

__all__ = ["TriangularMatrix"]

_ROWS = 256
_TAKEN_ROWS = 64
"""Rows gathered in one step. Whole rows need memory in addition to the matrix."""


class TriangularMatrix:
    """float32 matrix [size, size], stored as panels of rows up to the diagonal.

    Args:
        panels: float32 [rows, stop] for rows [start, stop). Every panel but the last has `_ROWS` rows. The
            square at its right end lies on the diagonal. A symmetric matrix fills the square. A triangular
            matrix leaves its upper half unread.
    """

    def __init__(self, panels: list[torch.Tensor]) -> None:
        self._panels = panels

    @classmethod
    def zeros(cls, size: int) -> TriangularMatrix:
        """Returns a matrix [size, size] of zeros."""
        return cls(
            [
                torch.zeros(min(_ROWS, size - start), min(start + _ROWS, size))
                for start in range(0, size, _ROWS)
            ]
        )

    @classmethod
    def of(cls, matrix: TriangularMatrix | torch.Tensor) -> TriangularMatrix:
        """Returns views of a dense matrix [size, size]. Returns a TriangularMatrix unchanged."""
        if isinstance(matrix, TriangularMatrix):
            return matrix
        return cls([matrix[start : start + _ROWS, : start + _ROWS] for start in range(0, len(matrix), _ROWS)])

    @staticmethod
    def nbytes_of(size: int) -> int:
        """Returns the bytes of a matrix of this size."""
        return sum(4 * min(_ROWS, size - start) * min(start + _ROWS, size) for start in range(0, size, _ROWS))

    @property
    def size(self) -> int:
        return self._panels[-1].shape[1]

    def add_products(self, rows: torch.Tensor) -> None:
        """Adds X^T X, for X float32 [tokens, size]."""
        for start, stop, panel in self._spans():
            panel.addmm_(rows[:, start:stop].t(), rows[:, :stop])

    def divide(self, by: float | torch.Tensor) -> TriangularMatrix:
        """Divides in place by a number, or each column by its element of a vector [size]."""
        for _, stop, panel in self._spans():
            panel.div_(by[:stop] if isinstance(by, torch.Tensor) else by)
        return self

    def diagonal(self) -> torch.Tensor:
        """Returns a copy of the diagonal [size]."""
        return torch.cat([panel.diagonal(start) for start, _, panel in self._spans()])

    def add_to_diagonal(self, value: float) -> None:
        """Adds a number to the diagonal in place."""
        for start, _, panel in self._spans():
            panel.diagonal(start).add_(value)

    def is_finite(self) -> bool:
        """True if every value is finite and no panel's sum overflows."""
        return all(bool(torch.isfinite(panel.sum())) for panel in self._panels)

    def pieces(self, first: int, last: int) -> Iterator[tuple[int, int, torch.Tensor]]:
        """Yields views of rows [first, last) by panel: (start, stop, [stop - start, stop or wider])."""
        for number in range(first // _ROWS, -(-last // _ROWS)):
            start = number * _ROWS
            above, below = max(first, start), min(last, start + _ROWS)
            yield above, below, self._panels[number][above - start : below - start]

    def corner(self, first: int, last: int) -> torch.Tensor:
        """Returns the square of rows and columns [first, last). Only its lower half is valid.

        The result is a view if the rows lie in one panel.
        """
        pieces = list(self.pieces(first, last))
        if len(pieces) == 1:
            return pieces[0][2][:, first:last]
        square = torch.zeros(last - first, last - first)
        for start, stop, rows in pieces:
            part = rows[:, first:last]
            square[start - first : stop - first, : part.shape[1]] = part
        return square

    def whole(self) -> torch.Tensor:
        """Returns the whole symmetric matrix [size, size], and empties this one."""
        matrix, self._panels = self._whole_rows(torch.arange(self.size)), []
        return matrix

    def permute(self, order: torch.Tensor) -> TriangularMatrix:
        """Returns the symmetric matrix of elements [order[i], order[j]].

        Empties this matrix panel by panel. The last rows of the new matrix are extracted first, and the rest
        becomes a smaller matrix.
        """
        left, done = torch.arange(self.size), []
        for start in reversed(range(0, self.size, _ROWS)):
            places = torch.searchsorted(left, order[: start + _ROWS])
            taken = torch.empty(len(places) - start, len(places))
            for part, rows in zip(taken.split(_TAKEN_ROWS), places[start:].split(_TAKEN_ROWS), strict=True):
                torch.index_select(self._whole_rows(rows), 1, places, out=part)
            done.append(taken)
            trim_heap()
            is_left = torch.ones(len(left), dtype=torch.bool)
            is_left[places[start:]] = False
            self._keep(is_left.nonzero().flatten())
            left = left[is_left]
            trim_heap()
        return TriangularMatrix(done[::-1])

    def factor(self) -> bool:
        """Replaces a symmetric matrix A in place by the lower triangular L with A = L L^T.

        Returns:
            True if A is positive definite. Otherwise the matrix is restored, except for rounding.
        """
        for number, (start, _, panel) in enumerate(self._spans()):
            for _, stop, above in self._spans(number):
                begin = stop - above.shape[0]
                part = panel[:, begin:stop]
                if begin:
                    part.addmm_(panel[:, :begin], above[:, :begin].t(), alpha=-1)
                part.copy_(
                    torch.linalg.solve_triangular(above[:, begin:stop].t(), part, upper=True, left=False)
                )
            corner = panel[:, start:]
            if start:
                corner.addmm_(panel[:, :start], panel[:, :start].t(), alpha=-1)
            lower, info = torch.linalg.cholesky_ex(corner)
            if info or not torch.isfinite(lower.diagonal()).all():
                self._restore(number)
                return False
            corner.copy_(lower)
        return True

    def _restore(self, number: int) -> None:
        """Undoes `factor` after it failed at the corner of a panel."""
        panels = self._panels
        for row in range(number, -1, -1):
            start = panels[row].shape[1] - panels[row].shape[0]
            corner = panels[row][:, start:]
            if row == number:
                corner.addmm_(panels[row][:, :start], panels[row][:, :start].t())
            else:
                corner.copy_(panels[row] @ panels[row].t())
            for column in range(row - 1, -1, -1):
                stop = panels[column].shape[1]
                part = panels[row][:, :stop] @ panels[column].t()
                panels[row][:, stop - panels[column].shape[0] : stop] = part

    def _spans(self, count: int | None = None) -> Iterator[tuple[int, int, torch.Tensor]]:
        """Yields (start, stop, panel) of the first `count` panels."""
        for panel in self._panels[:count]:
            rows, stop = panel.shape
            yield stop - rows, stop, panel

    def _whole_rows(self, places: torch.Tensor) -> torch.Tensor:
        """Returns whole rows of the symmetric matrix, [places, size]."""
        rows = torch.empty(len(places), self.size)
        for start, stop, panel in self._spans():
            inside = ((places >= start) & (places < stop)).nonzero()[:, 0]
            above = (places < start).nonzero()[:, 0]
            rows[inside, :stop] = panel.index_select(0, places[inside] - start)
            rows[above, start:stop] = panel.index_select(1, places[above]).t()
        return rows

    def _keep(self, kept: torch.Tensor) -> None:
        """Keeps only the rows and columns at these ascending places, in place.

        A row moves up by less than a panel. A panel's own rows have therefore been read before the panel is
        overwritten.
        """
        old, spans = self._panels, list(self._spans())
        self._panels = []
        for number, top in enumerate(range(0, len(kept), _ROWS)):
            rows, columns = kept[top : top + _ROWS], kept[: top + _ROWS]
            panel = torch.zeros(len(rows), len(columns))
            for start, stop, source in spans:
                begin, end = int((rows < start).sum()), int((rows < stop).sum())
                within = columns[columns < stop]
                for first in range(begin, end, _TAKEN_ROWS):
                    last = min(first + _TAKEN_ROWS, end)
                    chosen = source.index_select(0, rows[first:last] - start)
                    torch.index_select(chosen, 1, within, out=panel[first:last, : len(within)])
            corner = panel[:, top:]
            corner.copy_(corner.tril() + corner.tril(-1).t())
            self._panels.append(old[number].copy_(panel))

"""The lower half of a symmetric or a triangular matrix: second moments and their factors, in half of the
memory and of the work.

The matrix lies in panels of rows, each as wide as its last row is long. Beside it, no operation takes more
than some panels.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from hfq.quantization.malloc_trim import trim_heap

__all__ = ["TriangularMatrix"]

_ROWS = 256
_TAKEN_ROWS = 64
"""Rows that are gathered at once: whole ones lie beside the matrix."""


class TriangularMatrix:
    """A float32 matrix [size, size] of which panels of rows hold what lies on and below the diagonal.

    Args:
        panels: float32 [rows, stop] for rows [start, stop) each, `_ROWS` but for the last. The square at a
            panel's end lies on the diagonal; of a symmetric matrix it is whole, of a triangular one its upper
            half is not looked at.
    """

    def __init__(self, panels: list[torch.Tensor]) -> None:
        self._panels = panels

    @classmethod
    def zeros(cls, size: int) -> TriangularMatrix:
        """The matrix [size, size] of zeros."""
        return cls(
            [
                torch.zeros(min(_ROWS, size - start), min(start + _ROWS, size))
                for start in range(0, size, _ROWS)
            ]
        )

    @classmethod
    def of(cls, matrix: TriangularMatrix | torch.Tensor) -> TriangularMatrix:
        """Views of a matrix [size, size]; a triangle as it is."""
        if isinstance(matrix, TriangularMatrix):
            return matrix
        return cls([matrix[start : start + _ROWS, : start + _ROWS] for start in range(0, len(matrix), _ROWS)])

    @staticmethod
    def nbytes_of(size: int) -> int:
        """The bytes that a matrix of this size takes."""
        return sum(4 * min(_ROWS, size - start) * min(start + _ROWS, size) for start in range(0, size, _ROWS))

    @property
    def size(self) -> int:
        return self._panels[-1].shape[1]

    def add_products(self, rows: torch.Tensor) -> None:
        """Adds X^T X, X float32 [tokens, size]."""
        for start, stop, panel in self._spans():
            panel.addmm_(rows[:, start:stop].t(), rows[:, :stop])

    def divide(self, by: float | torch.Tensor) -> TriangularMatrix:
        """Divides, in place, all by a number or each column by its own [size]."""
        for _, stop, panel in self._spans():
            panel.div_(by[:stop] if isinstance(by, torch.Tensor) else by)
        return self

    def diagonal(self) -> torch.Tensor:
        """A copy of the diagonal [size]."""
        return torch.cat([panel.diagonal(start) for start, _, panel in self._spans()])

    def add_to_diagonal(self, value: float) -> None:
        """Adds a number to the diagonal, in place."""
        for start, _, panel in self._spans():
            panel.diagonal(start).add_(value)

    def is_finite(self) -> bool:
        """Whether every value is, and sums do not overflow."""
        return all(bool(torch.isfinite(panel.sum())) for panel in self._panels)

    def pieces(self, first: int, last: int) -> Iterator[tuple[int, int, torch.Tensor]]:
        """Rows [first, last), panel by panel: (start, stop, [stop - start, at least stop]), views."""
        for number in range(first // _ROWS, -(-last // _ROWS)):
            start = number * _ROWS
            above, below = max(first, start), min(last, start + _ROWS)
            yield above, below, self._panels[number][above - start : below - start]

    def corner(self, first: int, last: int) -> torch.Tensor:
        """The square of rows and columns [first, last), of which the lower half counts; a view where it lies
        in one panel.
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
        """The symmetric matrix [size, size]; this one is used up."""
        matrix, self._panels = self._whole_rows(torch.arange(self.size)), []
        return matrix

    def permute(self, order: torch.Tensor) -> TriangularMatrix:
        """The symmetric matrix of elements [order[i], order[j]]; this one is used up, panel by panel.

        The last rows of the new matrix are taken first, and leave the old one a smaller matrix of the rest.
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
        """Turns a symmetric matrix A into L, lower triangular with A = L L^T, in place.

        Returns:
            Whether it was positive definite. If not, it is as before but for rounding.
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
        """Undoes `factor`, which has come as far as the corner of a panel."""
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
        """(start, stop, panel) of the first `count` panels."""
        for panel in self._panels[:count]:
            rows, stop = panel.shape
            yield stop - rows, stop, panel

    def _whole_rows(self, places: torch.Tensor) -> torch.Tensor:
        """Whole rows of the symmetric matrix: [places, size]."""
        rows = torch.empty(len(places), self.size)
        for start, stop, panel in self._spans():
            inside, above = (
                ((places >= start) & (places < stop)).nonzero()[:, 0],
                (places < start).nonzero()[:, 0],
            )
            rows[inside, :stop] = panel.index_select(0, places[inside] - start)
            rows[above, start:stop] = panel.index_select(1, places[above]).t()
        return rows

    def _keep(self, kept: torch.Tensor) -> None:
        """Leaves the rows and columns of these places, in ascending order, in the memory of the first panels.

        A row moves up by less than a panel, so that a panel's own rows are not needed any more when it is
        written.
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

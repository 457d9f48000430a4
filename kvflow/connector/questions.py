"""Questions to the actors that have no answer yet, asked again until they have one."""

import heapq
from dataclasses import dataclass

from kvflow.connector.port import Letter

FIRST_PAUSE_S = 3.0
# Each registration asked again is kept in the control stream, block tables and all: a long wait must not fill it.
LONGEST_PAUSE_S = 24.0
MOST_AT_ONCE = 32


@dataclass(slots=True, eq=False)
class _Question:
    letter: Letter
    pause_s: float = FIRST_PAUSE_S


class Questions:
    """Keep one open question per request, and say which are to be asked again. All costs are those of a heap."""

    def __init__(self) -> None:
        self._open: dict[str, _Question] = {}
        # What was answered or replaced stays until its time has come, or until nothing is open.
        self._heap: list[tuple[float, int, str, _Question]] = []
        self._sequence = 0

    def __len__(self) -> int:
        return len(self._open)

    def ask(self, request_id: str, letter: Letter, now: float) -> None:
        """Note that a question was asked at `now` (s), or replaces another one; `letter` asks it again."""
        question = self._open[request_id] = _Question(letter)
        self._push(request_id, question, now)

    def answered(self, request_id: str) -> None:
        """Forget a question."""
        self._open.pop(request_id, None)
        if not self._open:
            self._heap.clear()

    def is_due(self, now: float) -> bool:
        """Return whether there may be something to ask again."""
        return bool(self._heap) and self._heap[0][0] <= now

    def due(self, now: float) -> list[Letter]:
        """Return what to ask again, at most MOST_AT_ONCE letters: the rest is due at the next step."""
        letters: list[Letter] = []
        heap = self._heap
        while heap and heap[0][0] <= now and len(letters) < MOST_AT_ONCE:
            _, _, request_id, question = heapq.heappop(heap)
            if self._open.get(request_id) is question:
                letters.append(question.letter)
                question.pause_s = min(2 * question.pause_s, LONGEST_PAUSE_S)
                self._push(request_id, question, now)
        return letters

    def clear(self) -> None:
        """Forget everything."""
        self._open.clear()
        self._heap.clear()

    def _push(self, request_id: str, question: _Question, now: float) -> None:
        self._sequence += 1
        heapq.heappush(self._heap, (now + question.pause_s, self._sequence, request_id, question))

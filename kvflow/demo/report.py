"""Say per request what crossed, where the time went, and whether the tokens are those of one engine alone."""

import itertools
from collections.abc import Sequence

import msgspec
from rich import box
from rich.console import Console
from rich.table import Table

from kvflow.demo.client import Completion
from kvflow.messages import TransferEvent


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """Report one request. Times are milliseconds; the five stages add up to TTFT where all events came."""

    tokens_in: int
    tokens_out: int
    equal: bool
    transferred: bool
    nothing_to_move: bool = False
    ttft_ms: float
    alone_ttft_ms: float
    tpot_ms: float
    alone_tpot_ms: float
    bytes: int = 0
    pieces: int = 0
    descriptors: int = 0
    pushed_early: float = 0.0
    queue_ms: float = 0.0
    prefill_ms: float = 0.0
    last_chunk_ms: float = 0.0
    handoff_ms: float = 0.0
    first_decode_ms: float = 0.0
    problem: str = ""

    @property
    def good(self) -> bool:
        """Return whether the tokens are right and the KV really crossed."""
        return self.equal and (self.transferred or self.nothing_to_move)


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """Report the whole demo; `total_s` is with start-up."""

    ok: bool
    total_s: float
    cores: int
    model: str
    requests: tuple[Row, ...]


def row_of(tokens_in: int, ours: Completion, alone: Completion, events: Sequence[TransferEvent]) -> Row:
    """Make the row of one request from both answers and the transfer's events (one source rank, one target)."""
    row = Row(
        tokens_in=tokens_in,
        tokens_out=len(ours.tokens),
        equal=ours.tokens == alone.tokens,
        transferred=False,
        ttft_ms=ours.ttft_s * 1000,
        alone_ttft_ms=alone.ttft_s * 1000,
        tpot_ms=ours.tpot_s * 1000,
        alone_tpot_ms=alone.tpot_s * 1000,
    )
    last = {event.kind: event for event in events}
    delivered, completed = last.get("delivered"), last.get("completed")
    if completed is not None and delivered is None and completed.tokens == 0:
        return msgspec.structs.replace(row, nothing_to_move=True)
    if delivered is None or completed is None:
        why = next((f"{event.kind}: {event.reason} {event.detail}" for event in events if event.reason), "")
        return msgspec.structs.replace(row, problem=why or "no transfer was seen")
    opened = last["opened"].at if "opened" in last else ours.sent_at
    computed = delivered.at - delivered.last_progress_to_done_s
    marks = [ours.sent_at, opened, computed, delivered.at, completed.at, ours.first_at]
    stages = [max(0.0, later - earlier) * 1000 for earlier, later in itertools.pairwise(marks)]
    return msgspec.structs.replace(
        row,
        transferred=delivered.bytes_done > 0,
        bytes=delivered.bytes_done,
        pieces=delivered.pieces,
        descriptors=delivered.descriptors,
        pushed_early=delivered.bytes_early / delivered.bytes_done if delivered.bytes_done else 0.0,
        queue_ms=stages[0],
        prefill_ms=stages[1],
        last_chunk_ms=stages[2],
        handoff_ms=stages[3],
        first_decode_ms=stages[4],
    )


def print_report(report: Report, console: Console) -> None:
    """Print the report for people: what a user felt, then what crossed and where the time went."""
    felt = Table(title="Prefill and decode on two engines (in brackets: alone)", title_justify="left", box=box.SIMPLE)
    crossed = Table(
        title="What crossed, and where the time to first token went (ms)", title_justify="left",
        caption=_caption(report), caption_justify="left", box=box.SIMPLE,
    )  # fmt: skip
    for name in ("prompt", "answer", "TTFT ms", "TPOT ms", "tokens equal"):
        felt.add_column(name, justify="right")
    for name in ("prompt", "MB", "pieces", "early", "queue", "prefill", "chunk", "hand-off", "decode"):
        crossed.add_column(name, justify="right")
    for row in report.requests:
        felt.add_row(
            str(row.tokens_in),
            str(row.tokens_out),
            f"{row.ttft_ms:.1f} [dim]({row.alone_ttft_ms:.1f})",
            f"{row.tpot_ms:.1f} [dim]({row.alone_tpot_ms:.1f})",
            "[green]yes" if row.good else f"[red]{'no transfer' if row.equal else 'NO'}",
        )
        stages = (row.queue_ms, row.prefill_ms, row.last_chunk_ms, row.handoff_ms, row.first_decode_ms)
        crossed.add_row(
            str(row.tokens_in),
            "[dim]none" if row.nothing_to_move else f"{row.bytes / 1e6:.2f}",
            str(row.pieces),
            f"{row.pushed_early:.0%}",
            *(f"{stage:.1f}" for stage in stages),
        )
    console.print(felt, crossed)
    for row in report.requests:
        if row.problem:
            console.print(f"[red]{row.tokens_in} tokens: {row.problem}")
    console.print(f"[green]All tokens are those of one engine alone ({report.total_s:.0f} s)." if report.ok else
                  "[red]Not all requests went right.")  # fmt: skip


def _caption(report: Report) -> str:
    return (
        "early: share of the bytes that had arrived before prefill ended; chunk: from the end of prefill until the "
        "last byte was written; hand-off: until decode was told; decode: until its first token. "
        f"{report.cores} cores, shared by all engines."
    )

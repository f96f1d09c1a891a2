"""What `watch`, `list`, `show` and `plan` look like at three widths: the SVG files in docs/pictures/terminal.

The first three show a job that ran; the plan is what the planner finds for FLAN-T5-XL on an RTX 5090.

python -m tests.longhaul.pictures     # draw them anew, after a change of what these commands show
"""

from __future__ import annotations

import io
import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.terminal_theme import TerminalTheme
from rich.text import Text

from jobs.gpus import REFERENCE
from jobs.memory_plan import HostPlan
from jobs.plan import DataPlan, ModelPlan, Plan, Resolved, make_plan, make_time_plan
from jobs.preview import DataPreview, RowPreview, SourcePreview, TextPreview
from jobs.spec import parse_spec
from longhaul.figures import Terminal
from longhaul.plan import print_plan
from longhaul.tables import print_job, print_jobs
from longhaul.watch import print_event, status_line
from service.openapi.examples import by_schema
from worker.training.doctor.random_t5 import SHAPES
from worker.training.planning.budget import find_budget
from worker.training.planning.memory_plan import plan_memory
from worker.training.tasks.seq2seq.task import Seq2Seq

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "pictures" / "terminal"
WIDTHS = (60, 80, 120)
RECORDED = Path(__file__).parent / "recorded_job.json"
"""What a job of examples/ and those beside it were like while it ran on a CPU (`tests.service.pages.gallery`)."""
_THEME = TerminalTheme(
    (250, 250, 250), (30, 30, 30),
    [
        (40, 40, 40), (190, 40, 40), (20, 130, 60), (160, 110, 0),
        (40, 80, 180), (140, 50, 150), (0, 125, 140), (90, 90, 90),
    ],
)  # fmt: skip
_FRAME = """\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" class="rich-terminal">
<style>
.{unique_id}-matrix {{ font-family: ui-monospace, "DejaVu Sans Mono", Menlo, Consolas, monospace;
font-size: {char_height}px; line-height: {line_height}px; font-variant-east-asian: full-width; }}
{styles}
</style>
<defs>
<clipPath id="{unique_id}-clip-terminal">
<rect x="0" y="0" width="{terminal_width}" height="{terminal_height}"/>
</clipPath>
{lines}
</defs>
<rect fill="#fafafa" width="{width}" height="{height}" rx="8"/>
<g transform="translate(9, 24)" clip-path="url(#{unique_id}-clip-terminal)">
{backgrounds}
<g class="{unique_id}-matrix">
{matrix}
</g>
</g>
</svg>
"""


def pictures() -> Iterator[tuple[str, str]]:
    """Each file's name and content."""
    for name, show in {"watch": _watch, "list": _list, "show": _show, "plan": _plan}.items():
        for width in WIDTHS:
            yield f"{name}-{width}.svg", drawn(show, width)


@cache
def recorded() -> Any:
    """Answers of the service, and when they were given (`now`)."""
    return json.loads(RECORDED.read_text())


def drawn(show: Callable[[Console], None], width: int) -> str:
    """What a terminal of this width shows, at a fixed time in a fixed zone."""
    console = Terminal(file=io.StringIO(), width=width, record=True, force_terminal=True, color_system="truecolor")
    with _at_a_fixed_time():
        show(console)
    return console.export_svg(theme=_THEME, code_format=_FRAME, unique_id="t", title="")


@contextmanager
def _at_a_fixed_time() -> Iterator[None]:
    zone, clock = os.environ.get("TZ"), time.time
    os.environ["TZ"] = "UTC"
    time.tzset()
    time.time = lambda: float(recorded()["now"])
    try:
        yield
    finally:
        time.time = clock
        if zone is None:
            del os.environ["TZ"]
        else:
            os.environ["TZ"] = zone
        time.tzset()


def _watch(console: Console) -> None:
    job = recorded()["job"]
    console.print(Text(f"{job['name']} · {job['id']} · {job['model']}", style="bold"))
    for event in recorded()["events"][-6:]:
        print_event(event, console)
    console.print(status_line(job, console))


def _list(console: Console) -> None:
    print_jobs(recorded()["jobs"], console)


def _show(console: Console) -> None:
    print_job(recorded()["job"], console, recorded()["checkpoints"])


def _plan(console: Console) -> None:
    print_plan(_plan_of_xl(), _PREVIEW, by_schema()["Job"], console)


def _plan_of_xl() -> Plan:
    shape = SHAPES["xl"] | {"dropout_rate": 0.1}
    spec = parse_spec({"data": {"train": "recipes.jsonl"}, "training": {"batch_size": 128}})
    budget = find_budget(spec.memory, "cuda", REFERENCE)
    memory = plan_memory(spec, Seq2Seq(), shape, (256, 256), device="cuda", budget=budget).model_copy(
        update={"host": HostPlan(copy_bytes=11_500_000_000, available_bytes=58_000_000_000, fits=True)}
    )
    model = ModelPlan(source="google/flan-t5-xl", parameters=2_849_757_184)
    data = DataPlan(train="recipes.jsonl", input="{title}", target="{directions}", rows=6_000_000, complete=True)
    resolved = Resolved(
        micro_batch=memory.micro_batch, activation_checkpointing=memory.activation_checkpointing,
        optimizer=memory.optimizer, compile=True,
    )  # fmt: skip
    flops = 4.39e12 * 30_000_000
    hours = make_time_plan(
        model_flops=flops, recomputed_flops=0.0, estimated=False, device="cuda", gpu=REFERENCE,
        parameters=model.parameters, compiled=True, step_flops=flops / 234_375,
    )  # fmt: skip
    return make_plan(spec, model, data).model_copy(update={"memory": memory, "time": hours, "resolved": resolved})


def _text(text: str, tokens: int) -> TextPreview:
    return TextPreview(text=text, characters=len(text), tokens=tokens, cut_characters=0, unknown={})


_SOURCE = SourcePreview(
    name="recipes.jsonl", weight=1.0, read_as="title/directions", input="{title}", target="{directions}",
    rows=[
        RowPreview(
            number=1, input=_text("Cream of tomato soup", 6),
            target=_text("Soften the onion in the butter over a low heat. Add the tomatoes and simmer for 20 minutes. "
                         "Blend until smooth, stir in the cream and season to taste.", 41),
            rewritten={},
        ),
        RowPreview(
            number=2, input=_text("Flat bread", 3),
            target=_text("Mix flour, salt and water to a soft dough. Rest it for half an hour, roll it thin and bake "
                         "it in a dry pan, half a minute on each side.", 38),
            rewritten={"´": 2},
        ),
    ],
)  # fmt: skip
_PREVIEW = DataPreview(sources=[_SOURCE])


if __name__ == "__main__":
    FOLDER.mkdir(parents=True, exist_ok=True)
    for file, picture in pictures():
        (FOLDER / file).write_text(picture)

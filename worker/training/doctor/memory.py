"""Memory of the GPU: what is free, who else is there, what our context takes, and whether a limit holds."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from jobs.text.units import GIB, MIB, bytes_alike, format_bytes
from worker.training.doctor.finding import Check, Examination, Finding, judge, skip
from worker.training.doctor.random_t5 import draw_batch, make_model
from worker.training.machine import expandable_segments
from worker.training.machine.device import gpu_id
from worker.training.machine.nvml import open_gpu
from worker.training.machine.process_monitor import ProcessMonitor, reserved_bytes
from worker.training.memory import hard_limit
from worker.training.planning.memory_plan import CONTEXT_BYTES
from worker.training.tasks.seq2seq.fused import fuse

DESKTOP = frozenset(
    {"Xorg", "Xwayland", "gnome-shell", "kwin_wayland", "kwin_x11", "plasmashell", "cinnamon", "mutter", "sway",
     "Hyprland", "weston", "cosmic-comp"}
)  # fmt: skip
"""Names of the programs that draw a desktop."""
LIMIT, PIECE = 3 * GIB, 16 * MIB
NEAR = 64 * MIB
"""So near to its limit an allocation must still succeed."""


def checks(examination: Examination) -> Mapping[str, Check]:
    """By name. Whatever is on the GPU before is looked at now."""
    device = torch.device(examination.device)
    expandable_segments.leave_off_where_broken(device)
    nvml = open_gpu(gpu_id(device))
    before = None if nvml is None else nvml.memory()
    monitor = ProcessMonitor.of(device)

    def free_memory() -> Finding:
        free, total = torch.cuda.mem_get_info(device)
        others = monitor.use()
        if others is None or not others.bytes:
            who, hint = "nobody else is on it" if others else "who else is on it is unknown", "look at nvidia-smi"
        else:
            desktop = sorted({each.name for each in others.processes if each.name} & DESKTOP)
            who = f"others hold {others.text}"
            hint = (
                f"the desktop ({', '.join(desktop)}) draws on this GPU: use another for it, or log out"
                if desktop
                else "end them, or jobs get less memory"
            )
        figures = bytes_alike(free, total)
        return judge(
            "free_memory", f"{figures[0]} of {figures[1]} free; {who}", limit="nobody else",
            warn=others is None or others.bytes > 0, hint=hint, free_bytes=free, total_bytes=total,
            other_bytes=others.bytes if others else 0,
        )  # fmt: skip

    def context() -> Finding:
        model = make_model(device, torch.bfloat16)
        fuse(model)
        draw_batch().loss_sum(model).backward()
        torch.cuda.synchronize(device)
        now = None if nvml is None else nvml.memory()
        if before is None or now is None:
            return skip("context", "NVML does not tell how much memory is used")
        taken = now.used - before.used - reserved_bytes(device)
        figure, limit = bytes_alike(taken, CONTEXT_BYTES)
        return judge(
            "context", f"{figure} besides tensors", limit=f"≤ {limit}", fail=taken > CONTEXT_BYTES,
            hint="plans count on less: report it with your driver's version; until then set memory.budget lower",
            bytes=taken,
        )  # fmt: skip

    def limit_holds() -> Finding:
        torch.cuda.empty_cache()
        held: list[torch.Tensor] = []
        refused = False
        with hard_limit.on_gpu(torch.device("cuda", torch.cuda.current_device()), LIMIT):
            while not refused and len(held) < 2 * LIMIT // PIECE:
                try:
                    held.append(torch.empty(PIECE, dtype=torch.uint8, device=device))
                except torch.OutOfMemoryError:
                    refused = True
            reached, allowed = torch.cuda.memory_reserved(device), LIMIT - CONTEXT_BYTES
            held.clear()
            torch.cuda.empty_cache()
            again = torch.ones(PIECE, dtype=torch.uint8, device=device)
            torch.cuda.synchronize(device)
        del again
        off = allowed - reached
        return judge(
            "hard_limit", f"memory ran out {format_bytes(abs(off))} {'below' if off >= 0 else 'above'} the limit, and "
            "is there again" if refused else "memory did not run out", limit=f"within {format_bytes(NEAR)}",
            fail=not refused or abs(off) > NEAR, hint="report it: memory.budget does not hold here", off_bytes=off,
        )  # fmt: skip

    return {"free_memory": free_memory, "context": context, "hard_limit": limit_holds}

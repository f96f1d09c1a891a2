"""`python validate.py`, in the environment that has SkyPilot: its validators read stdin.

Prints the document as they have understood it, as JSON. Ends with an error where they refuse it.
"""

from __future__ import annotations

import json
import sys

import yaml


def skypilot(text: str) -> object:
    """By the schema of task YAML, and by what `sky jobs launch` makes of it before it asks a cloud."""
    import sky
    from sky.jobs.state import ManagedJobStatus
    from sky.utils import common_utils

    task = sky.Task.from_yaml_config(yaml.safe_load(text))
    common_utils.check_cluster_name_is_valid(task.name)
    [resources] = task.resources
    return {
        "name": task.name, "envs": task.envs, "run": task.run, "setup": task.setup,
        "accelerators": resources.accelerators, "use_spot": resources.use_spot,
        "states": [status.value for status in ManagedJobStatus],
    }  # fmt: skip


if __name__ == "__main__":
    print("\n" + json.dumps(skypilot(sys.stdin.read())))

"""Kubeflow Trainer v2: a task is a TrainJob of one node. `kubectl` hands it over, and says how it is."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Field

from worker.engines.commands import ask, run
from worker.engines.copied_run import CopiedRunSettings
from worker.engines.engine import EngineRefused, EngineTask, EngineUnavailable, TaskState, TaskStatus
from worker.engines.train_job import Condition, Pods, TrainJob, parsed

_S = TaskStatus
LONGEST_NAME = 46
"""Kubernetes adds to the name of a TrainJob for those of its jobs and pods, which have 63 characters."""
LINES = 40
NODE = "node"
"""What Kubeflow calls the job that trains, and its container."""
SHARED_MEMORY = "longhaul-shm"


class KubeflowSettings(CopiedRunSettings):
    """`kind = "kubeflow"`: `kubectl` is a program of this machine, and may make TrainJobs."""

    kind: Literal["kubeflow"]
    image: str | None = None
    """Of the container; null: that of the runtime."""
    runtime: str = "torch-distributed"
    """Name of the runtime."""
    runtime_kind: Literal["ClusterTrainingRuntime", "TrainingRuntime"] = "ClusterTrainingRuntime"
    """Whether all namespaces share it."""
    context: str | None = None
    """Of kubectl's configuration; null: the current one."""
    namespace: str = "default"
    """In which TrainJobs are made."""
    claims: dict[str, str] = {}  # noqa: RUF012 - pydantic copies it
    """Without a bucket: which PersistentVolumeClaim is mounted where, such as `"/srv/longhaul" = "longhaul"`."""
    gpu_resource: str = "nvidia.com/gpu"
    """How the cluster names its GPUs."""
    cpus: str | None = None
    """Cores, such as `8`."""
    memory: str | None = None
    """Memory of the host, such as `64Gi`."""
    node_selector: dict[str, str] = {}  # noqa: RUF012
    """Labels of the machines that may train."""
    service_account: str | None = None
    """Of the pod: with it the node may reach a bucket."""
    grace_s: Annotated[int, Field(ge=10, le=86_400)] = 120
    """Seconds for a checkpoint, from the order to leave the machine."""

    def connect(self) -> Kubeflow:
        """Its program."""
        return Kubeflow(self)


class Kubeflow:
    """The engine, by kubectl. Its id of a task is the name of the TrainJob."""

    def __init__(self, settings: KubeflowSettings) -> None:
        self._settings = settings
        context = ("--context", settings.context) if settings.context else ()
        self._kubectl = ("kubectl", *context, "--namespace", settings.namespace, "--request-timeout", "30s")
        self.storage = settings.storage()

    def render(self, task: EngineTask) -> str:
        """The manifest of the TrainJob."""
        given = self._settings
        # The runtime may start a program again that has ended with an error. So it ends well; the report has its code.
        command = [*given.on_node(task).command, "--exit-0"]
        amounts = {given.gpu_resource: task.gpus or None, "cpu": given.cpus, "memory": given.memory}
        resources = {name: str(value) for name, value in amounts.items() if value is not None}
        environment = {"PYTHONPATH": str(task.directory), **task.environment}  # a TrainJob has no working directory
        mounts = {f"longhaul-{number}": each for number, each in enumerate(given.claims.items())}
        volumes: list[dict[str, object]] = [
            {"name": name, "persistentVolumeClaim": {"claimName": claim}} for name, (_, claim) in mounts.items()
        ]
        places = [{"name": name, "mountPath": path} for name, (path, _) in mounts.items()]
        if task.gpus > 1:  # processes of one job exchange gradients through it, and a pod has 64 MiB
            volumes.append({"name": SHARED_MEMORY, "emptyDir": {"medium": "Memory"}})
            places.append({"name": SHARED_MEMORY, "mountPath": "/dev/shm"})
        pod = {
            "terminationGracePeriodSeconds": given.grace_s,
            "nodeSelector": given.node_selector,
            "serviceAccountName": given.service_account,
            "volumes": volumes,
            "containers": [{"name": NODE, "volumeMounts": places}] if places else [],
        }
        trainer = {
            "numNodes": 1,
            "image": given.image,
            "command": command,
            "env": [{"name": name, "value": value} for name, value in sorted(environment.items())],
            "resourcesPerNode": {"requests": resources, "limits": resources} if resources else None,
        }
        patch = {"replicatedJobs": [{"name": NODE, "template": {"spec": {"template": {"spec": _given(pod)}}}}]}
        document = {
            "apiVersion": "trainer.kubeflow.org/v1alpha1",
            "kind": "TrainJob",
            "metadata": {
                "name": _name(task.name),
                "labels": {"app.kubernetes.io/managed-by": "longhaul"},
                "annotations": {"longhaul/job": task.job, "longhaul/attempt": str(task.attempt)},
            },
            "spec": {
                "runtimeRef": {"name": given.runtime, "kind": given.runtime_kind, "apiGroup": "trainer.kubeflow.org"},
                "trainer": _given(trainer),
                "runtimePatches": [{"manager": "longhaul/box", "trainingRuntimeSpec": {"template": {"spec": patch}}}],
            },
        }
        return json.dumps(document, indent=1, ensure_ascii=False) + "\n"

    def submit(self, task: EngineTask) -> str:
        """Its name."""
        try:
            run([*self._kubectl, "create", "--filename", "-"], self.render(task))
        except EngineRefused as error:
            if "Unable to connect" in str(error) or "was refused" in str(error):
                raise EngineUnavailable(str(error)) from None
            raise
        return _name(task.name)

    def find(self, name: str) -> str | None:
        """By name."""
        return None if self._get(_name(name)) is None else _name(name)

    def state(self, task: str) -> TaskState:
        """By the conditions of the TrainJob; why one has failed, its pod says. One that is deleted is there until its
        pod is gone.
        """
        job = self._get(task)
        if job is None:
            return TaskState(_S.GONE, "there is no such TrainJob any more")
        if job.metadata.deleted_at is not None:
            return TaskState(_S.RUNNING, "it is being deleted")
        holding = {each.type: each for each in job.status.conditions if each.status == "True"}
        if (complete := holding.get("Complete")) is not None:
            return TaskState(_S.ENDED, complete.text)
        if (failed := holding.get("Failed")) is not None:
            return self._failed(task, failed)
        if (suspended := holding.get("Suspended")) is not None:
            return TaskState(_S.QUEUED, suspended.text)
        if any(each.ready for each in job.status.jobs):
            return TaskState(_S.RUNNING, "its pod is ready")
        return TaskState(_S.QUEUED, "its pod is not ready")

    def _failed(self, task: str, failed: Condition) -> TaskState:
        """A pod that was taken away, or is gone with its machine, did nothing wrong."""
        said = self._ask("get", "pods", "--selector", _pods_of(task), "--output", "json")
        pods = [each.status for each in parsed(Pods, said).items]
        ends = [each.state.end for pod in pods for each in pod.containers if each.state.end is not None]
        if any(end.reason == "OOMKilled" for end in ends):
            return TaskState(_S.OUT_OF_MEMORY, "OOMKilled")
        if not pods or failed.reason == "DeadlineExceeded" or any(pod.taken_away for pod in pods):
            reason = next((pod.reason for pod in pods if pod.reason), failed.reason)
            return TaskState(_S.PREEMPTED, f"{failed.text}: {reason}" if reason else failed.text)
        codes = ", ".join(str(end.code) for end in ends)
        return TaskState(_S.FAILED, f"{failed.text}: exit code {codes}" if codes else failed.text)

    def logs(self, task: str) -> str:
        """What the program itself has said; the trainer writes to trainer.log."""
        return run([*self._kubectl, "logs", "--selector", _pods_of(task), "--tail", str(LINES)], any_code=True)

    def cancel(self, task: str) -> None:
        """Delete it, and what it has made before itself."""
        self._ask("delete", "trainjob", task, "--ignore-not-found", "--cascade=foreground", "--wait=false")

    def _get(self, name: str) -> TrainJob | None:
        said = self._ask("get", "trainjob", name, "--ignore-not-found", "--output", "json")
        return parsed(TrainJob, said) if said.strip() else None

    def _ask(self, *words: str) -> str:
        return ask([*self._kubectl, *words])


def _name(task: str) -> str:
    """Of the TrainJob."""
    if len(task) <= LONGEST_NAME:
        return task
    return f"{task[: LONGEST_NAME - 9].rstrip('-')}-{hashlib.sha256(task.encode()).hexdigest()[:8]}"


def _pods_of(task: str) -> str:
    """Selects the pods of a TrainJob."""
    return f"jobset.sigs.k8s.io/jobset-name={task}"


def _given(document: Mapping[str, object]) -> dict[str, object]:
    """Without what is not set."""
    return {name: value for name, value in document.items() if value not in (None, [], {})}

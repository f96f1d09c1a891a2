"""Read by every Python that a test starts: what a user's machine does when it has nothing else to do is done at once.

Generation and exports take the time of the CPU that nobody else wants (SCHED_IDLE). Beside other tests that is none,
for minutes. Which policy a process has asked for is then its name (/proc/PID/comm).
"""

import os


def _named_by_it(pid: int, policy: int, param: os.sched_param) -> None:
    with open("/proc/self/comm", "w") as comm:
        comm.write(f"policy {policy}")


os.nice = lambda increment: 0
os.sched_setscheduler = _named_by_it

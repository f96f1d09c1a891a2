"""Read by every Python that a test starts: what a user's machine does when it has nothing else to do is done at once.

Generation and exports take the time of the CPU that nobody else wants (SCHED_IDLE). Beside other tests that is none,
for minutes.
"""

import os

os.nice = lambda increment: 0
os.sched_setscheduler = lambda pid, policy, param: None

"""Memory while a job trains (planning/ is about before): the budget held, the plan compared, and a shortage survived.

Read hard_limit and first_step, then recovery with report and remedy.
"""

"""A step whose processes outlive what started them."""

from __future__ import annotations

import os
import subprocess
import time


def orphaning(rank, token, then="end", chained=True):
    """Leaves processes behind that no process group of the rank's names: in sessions of their own, and daemons.

    With ``chained`` one of them is a chain: each process in it starts the next and ends.
    """
    environ = {**os.environ, "PERFSUITE_TEST_TOKEN": token}
    chain = '[ $1 = 0 ] || { sleep 0.02; sh -c "$0" "$0" $(($1 - 1)) & }'
    subprocess.Popen(["sleep", "600"], start_new_session=True, env=environ)
    subprocess.run(["sh", "-c", "setsid sleep 600 &"], env=environ, check=True)
    if chained:
        subprocess.run(["setsid", "sh", "-c", chain, chain, "9999"], env=environ, check=True)
    return (lambda: time.sleep(3600)) if then == "hang" else (lambda: None)

#!/bin/bash
# torchrun on several nodes: run the same line on each.
#   HEAD=node0 NODES=4 RANKS=8 bash torchrun.sh [pytest's arguments]
# Under Slurm start one task per node: srun --ntasks-per-node=1 bash torchrun.sh
set -euo pipefail

head=${HEAD:?the host name of the first node}
if [ "${NODES:-4}" -gt 1 ]; then
    export PERFSUITE_KEY_FILE=${PERFSUITE_KEY_FILE:-$HOME/.perfsuite-key}   # on every node, mode 0600: docs/how-to/clusters.md
fi

[ $# -gt 0 ] || set -- test_perf
# timeout limits the run even if the launcher hangs. A restarted launch would measure everything again.
exec timeout -k 10 "${LIMIT:-2h}" torchrun --nnodes="${NODES:-4}" --nproc-per-node="${RANKS:-8}" --max-restarts=0 \
    --shutdown-timeout=5 --rdzv-backend=c10d --rdzv-endpoint="$head:${PORT:-29500}" -m pytest "$@"

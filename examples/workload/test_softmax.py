"""Cases of the workload Softmax, one per size."""

from softmax import Softmax

from perfsuite import sizes


@sizes(full=["65536x4096"], small=["256x1024"], param="shape")
def test_softmax(perf, shape):
    rows, columns = shape
    perf(Softmax(rows=rows, columns=columns))

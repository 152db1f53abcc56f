"""For each rule of the audit: tables that it must flag, and tables that it reads and must leave alone."""

from __future__ import annotations

from perfsuite.audit.table import AuditTable
from test_correctness.helpers.audit_tables import table

GPT = {"parameters": "1557611200", "num_layers": "48", "hidden_size": "1600", "sequence_length": "2048"}
LONG = {"num_layers": "24", "hidden_size": "2048", "sequence_length": "2048"}
CASES: dict[str, tuple[list[AuditTable], list[AuditTable]]] = {
    "speedup-ratio": (
        [table("devices throughput speedup", "1 101 1.0", "8 707 7.5")],
        [table("devices throughput speedup", "1 101 1.0", "8 707 7.0", "16 _ 12.0")],
    ),
    "efficiency-ratio": (
        [table("devices speedup efficiency:%", "1 1.00 100.0", "4 3.20 90.0")],
        [table("devices speedup efficiency:%", "1 1.00 100.0", "4 3.20 80.0")],
    ),
    "throughput-time": (
        [table("devices global_batch_size latency:ms throughput", "8 16 417.9 45.0")],
        [table("devices global_batch_size latency:ms throughput", "8 16 417.9 38.29")],
    ),
    "aggregate-as-per-device": (
        [table("devices local_batch_size latency:s throughput_per_device", "1 1 1.549 0.645", "8 1 3.950 2.025")],
        [table("devices local_batch_size latency:s throughput_per_device", "1 1 1.549 0.645", "8 1 3.950 0.2532")],
    ),
    "speedup-above-n": (
        [table("devices throughput", "1 100", "2 230")],
        [table("devices throughput", "1 100", "2 203")],
    ),
    "step-grows-faster-than-batch": (
        [table("devices local_batch_size iterations_per_s", "16 1 2.22", "16 2 0.81")],
        [table("devices local_batch_size iterations_per_s", "16 1 2.22", "16 2 1.30")],
    ),
    "tokens-rise-with-length": (
        [table("sequence_length throughput", "2048 312", "4096 178", "8192 94", batch_size="16")],
        [table("sequence_length throughput", "2048 312", "4096 150", "8192 70", batch_size="16")],
    ),
    "overhead-ratio": (
        [table("throughput overhead:%", "1000 0", "800 40.0")],
        [table("throughput overhead:%", "1000 0", "800 25.0", "500 50.0")],
    ),
    "rates-disagree": (
        [
            table("throughput tokens_per_s", "32 66523", "40 66523", devices="8", sequence_length="2048"),
            table("devices tokens_per_s tokens_per_s_per_device", "8 8000 8000"),
            table("throughput tokens_per_s_per_device", "32.5 66560", devices="16", sequence_length="2048"),
        ],
        [
            table("throughput tokens_per_s", "32 66523", "1 2860", devices="8", sequence_length="2048"),  # cut off
            table("devices tokens_per_s tokens_per_s_per_device", "8 8000 1000", "8 8000 _"),
            table("dp tp ep tokens_per_s tokens_per_s_per_device", "4 2 4 8000 1000"),  # experts on the ranks of dp
        ],
    ),
    "tokens-above-peak": (
        [
            table("tokens_per_s_per_device", "30000", parameters="7e9", peak_tflops="312", loss="2"),
            table("devices tokens_per_s", "2 60000", parameters="7e9", peak_tflops="312"),
        ],
        [
            table("tokens_per_s_per_device", "7000", parameters="7e9", peak_tflops="312", loss="2"),
            table("tokens_per_s_per_device", "20000", parameters="7e9", peak_tflops="312"),  # forward alone
            table(
                "model tokens_per_s_per_device", "Mixtral-8x7B 3000", parameters="46.7e9", peak_tflops="312", loss="2"
            ),
        ],
    ),
    "mfu-tokens": (
        [
            table("mfu:% tokens_per_s_per_device loss", "40 7500 2", parameters="1.00e9", peak_tflops="312", **LONG),
            table("mfu:% tokens_per_s_per_device loss", "40 70000 2", parameters="1.00e9", peak_tflops="312"),
        ],
        [
            table("mfu:% tokens_per_s_per_device loss", "40 18000 2", parameters="1.00e9", peak_tflops="312", **LONG),
            table(
                "mfu:% tokens_per_s_per_device loss", "40 4000 2", parameters="1.00e9", peak_tflops="312"
            ),  # attention?
        ],
    ),
    "tflops-rate": (
        [table("tflops tokens_per_s_per_device loss", "150 2500 2", parameters="1.00e9", **LONG)],
        [table("tflops tokens_per_s_per_device loss", "150 20000 2", "150 16000 2", parameters="1.00e9", **LONG)],
    ),
    "mfu-tflops": (
        [table("mfu:% tflops", "40.0 124.8", "35.0 130.2", device="A100")],
        [
            table("mfu:% tflops", "40.0 124.8", "35.0 109.2", device="A100"),
            table("device mfu:% tflops", "A100 40.0 124.8", "H100 40.0 395.8"),
            table("mfu:% tflops recompute=config", "40.0 124.8 no", "35.0 145.6 full", device="A100"),
        ],
    ),
    "mfu-tflops-peak": (
        [table("mfu:% tflops", "20.0 150.0", peak_tflops="312")],
        [table("mfu:% tflops", "40.0 160.0", peak_tflops="312")],
    ),
    "tflops-tokens": (
        [
            table("tflops tokens_per_s_per_device", "150 20000", "120 20000", model="gpt"),
            table("mfu:% tokens_per_s_per_device", "40.0 20000", "30.0 20000", model="gpt", device="A100"),
        ],
        [
            table("model tflops tokens_per_s_per_device", "a 150 20000", "b 120 4000"),
            table("tflops tokens_per_s_per_device", "150 20000", "120 16000", model="gpt"),
        ],
    ),
    "parts-above-whole": (
        [table("forward_time:ms backward_time:ms whole:ms", "250 910 1000")],
        [table("forward_time:ms backward_time:ms whole:ms", "250 910 1160")],
    ),
    "nested-part": (
        [
            table(
                "data_time:ms forward_time:ms backward_time:ms optimizer_time:ms latency:ms",
                "389.86 249.21 910.16 727.68 1549.23",
                "536.59 354.97 1509.88 1234.71 2401.44",
            )
        ],
        [
            table(
                "data_time:ms forward_time:ms backward_time:ms optimizer_time:ms latency:ms",
                "389.86 249.21 182.48 727.68 1549.23",
            )
        ],
    ),
    "parts-below-whole": (
        [table("forward_time:ms backward_time:ms latency:ms", "100 200 400")],
        [table("forward_time:ms backward_time:ms remainder_time:ms latency:ms", "100 200 100 400")],
    ),
    "total-row": (
        [table("config compute_time:ms", "ffn 142", "attention 89", "total 268")],
        [table("config compute_time:ms", "ffn 142", "attention 89", "total 231")],
    ),
    "share-of-total": (
        [table("config compute_time:ms communication_time:ms share:%", "ffn 142 38 45.2", "other 37 0 54.8")],
        [table("config compute_time:ms communication_time:ms share:%", "ffn 142 38 82.9", "other 37 0 17.1")],
    ),
    "share-range": (
        [table("communication_time:ms whole:ms", "8.2 53.5", "27.4 82.2", communication_share="15-40 %")],
        [table("communication_time:ms whole:ms", "8.2 53.5", "27.4 82.2", communication_share="15-33 %")],
    ),
    "flops-above-peak": (
        [table("devices throughput", "1 245", peak_tflops="312 TFLOPS", **GPT)],
        [table("devices throughput", "1 5.7", peak_tflops="312 TFLOPS", **GPT)],
    ),
    "share-out-of-range": (
        [table("mfu:%", "152.0")],
        [table("mfu:%", "48.3"), table("mfu", "0.483"), table("mfu", "100%")],
    ),
    "mfu-throughput": (
        [table("devices throughput mfu:%", "32 312 41.2", "32 487 38.7")],
        [table("devices throughput mfu:%", "1 245 42.3", "8 1,812 39.1")],
    ),
    "mfu-peak": (
        [table("devices throughput mfu:%", "1 245 42.3", peak_tflops="312 TFLOPS", **GPT)],
        [table("devices throughput mfu:%", "1 5.74 42.3", "1 0 42.3", peak_tflops="312 TFLOPS", **GPT)],
    ),
    "implied-parameters": (
        [
            table(
                "devices local_batch_size sequence_length tflops latency:s memory_weights:GB",
                "1 1 512 0.029 1.549 0.707",
            ),
            table(
                "throughput mfu:%",
                "2567 48.3",
                devices="256",
                peak_tflops="312",
                parameters="1.6 T",
                experts="64",
                top_k="2",
                sequence_length="2048",
            ),
        ],
        [table("devices local_batch_size sequence_length tflops latency:s parameters:M", "1 1 512 1.0 2.4 760")],
    ),
    "peak-not-dense": (
        [table("device stated_peak_tflops dense_peak_tflops", "4090 330.3 165.2")],
        [table("device stated_peak_tflops dense_peak_tflops", "a100 312 312", "4090 82.6 165.2")],
    ),
    "size-is-count": (
        [table("model model_size:MB parameters:M", "latte 457 457.1")],
        [
            table("model model_size:MB parameters:M", "latte 914 457.1"),
            table("model_size parameters:B", "1.828 0.4571"),
        ],
    ),
    "bandwidth-time": (
        [
            table(
                "collective communication_time:ms bandwidth:GB/s",
                "all_gather 0.1 8",
                "all_reduce 2.1 45",
                devices="4",
            )
        ],
        [
            table(
                "collective communication_time:ms bandwidth:GB/s",
                "all_gather 1.00 45.0",
                "all_reduce 2.00 45.0",
                devices="4",
            )
        ],
    ),
    "more-devices-than-there-are": (
        [table("devices latency:s", "64 2.12", "128 1.34", available_devices="64")],
        [table("devices latency:s", "64 2.12", available_devices="64")],
    ),
    "batch-product": (
        [
            table("micro_batch_size dp num_micro_batches global_batch_size", "2 8 32 500"),
            table("local_batch_size devices global_batch_size", "3 8 25"),
        ],
        [
            table("micro_batch_size dp num_micro_batches global_batch_size", "2 8 32 512"),
            table("local_batch_size dp num_micro_batches global_batch_size", "2 8 32 512"),
            table("local_batch_size devices global_batch_size", "3 8 24"),
        ],
    ),
    "weights-above-memory": (
        [table("tp memory:GB", "2 42", parameters="175 B")],
        [
            table("tp memory:GB", "2 92", parameters="175 B"),
            table("strategy devices memory", "offload 1 9", parameters="13 B"),
        ],
    ),
    "memory-exactly-inverse": (
        [table("devices memory:GB", "1 78", "2 39", "8 10", local_batch_size="32")],
        [table("devices memory:GB", "1 78", "2 45", "8 21", local_batch_size="32")],
    ),
    "memory-above-capacity": (
        [table("memory:GiB", "17.2", memory_capacity="16 GiB")],
        [table("memory:MiB", "15670", memory_capacity="16 GB")],
    ),
    "rate-of-out-of-memory": (
        [table("sequence_length memory throughput", "32768 OOM 28")],
        [table("sequence_length memory throughput", "32768 OOM -", "2048 45 312")],
    ),
    "residual-column": (
        [
            table(
                "memory_weights:GB memory_optimizer:GB memory:GB memory_final:GB",
                "0.707 21.182 26.169 21.889",
                "0.707 16.891 19.742 17.598",
                "0.707 14.737 17.987 15.445",
            )
        ],
        [
            table(
                "memory_weights:GB memory_optimizer:GB memory_remainder memory:GB memory_final:GB",
                "0.707 21.182 4.280 26.169 21.889",
                "0.707 16.891 2.144 19.742 17.598",
                "0.707 14.737 2.543 17.987 15.445",
            ),
            table(
                "memory_weights:GB memory_optimizer:GB memory:GB memory_final:GB",
                "0.707 21.182 26.169 22.101",
                "0.707 16.891 19.742 17.703",
                "0.707 14.737 17.987 15.612",
            ),
        ],
    ),
    "optimizer-not-sharded": (
        [table("devices memory_optimizer:GB", "1 21.182", "2 16.891", "4 14.737", "8 13.687")],
        [
            table("devices memory_optimizer:GB", "1 20.000", "2 10.000", "4 5.000", "8 2.500"),
            table("devices memory_optimizer:GB", "1 20.000", "2 20.000", "4 20.000", "8 20.000"),
        ],
    ),
    "bubble-below-bound": (
        [
            table("schedule num_micro_batches bubble:%", "1F1B 8 22.4", stages="4"),
            table("schedule num_micro_batches bubble:%", "Naive 4 56.2", stages="4"),
            table("num_micro_batches bubble:%", "8 22.4", stages="4"),
        ],
        [
            table("schedule num_micro_batches bubble:%", "1F1B 8 27.3", "GPipe 8 35.1", "naive 8 75.0", stages="4"),
            table("schedule virtual_stages num_micro_batches bubble:%", "interleaved 2 8 15.8", stages="4"),
            table("schedule num_micro_batches bubble:%", "zero-bubble 8 5.9", "interleaved 8 15.8", stages="4"),
        ],
    ),
    "bubble-falls-with-stages": (
        [table("stages bubble:%", "2 28.5", "4 18.2", "8 12.4", schedule="1F1B")],
        [table("stages bubble:%", "2 11.1", "4 27.3", "8 46.7", schedule="1F1B")],
    ),
    "1f1b-memory-grows": (
        [table("schedule num_micro_batches memory:GB", "1F1B 8 19", "1F1B 16 23", stages="4")],
        [
            table(
                "schedule num_micro_batches memory:GB",
                "1F1B 8 19",
                "1F1B 16 19",
                "GPipe 8 22",
                "GPipe 16 31",
                stages="4",
            )
        ],
    ),
    "does-not-divide": (
        [table("tp throughput", "64 412", num_heads="96"), table("pp throughput", "32 10", num_layers="24")],
        [table("tp throughput", "32 412", num_heads="96"), table("pp throughput", "24 10", num_layers="24")],
    ),
    "layout-product": (
        [table("devices dp tp pp", "64 2 8 8")],
        [table("devices dp tp pp", "64 1 8 8"), table("devices dp tp pp ep sp", "32 2 4 4 2 2", "128 2 4 4 2 2")],
    ),
    "equal-digits": (
        [table("devices loss", "2 0.002376629039645", "4 0.002376629039645")],
        [
            table("devices loss", "2 0.00237", "4 0.00237"),
            table("devices loss", "2 0.002376629039645", "4 0.002376629039645", simulated=True),
        ],
    ),
    "constant-measurement": (
        [table("devices latency:ms", "1 417.9", "2 417.9", "4 417.9")],
        [
            table("devices latency:ms", "1 417.9", "2 418.1", "4 417.9"),
            table("devices loss", "1 2.5", "2 2.5", "4 2.5"),
        ],
    ),
    "repeated-row": (
        [table("devices memory iterations_per_s", "8 18.9G 1.52", "16 18.9 1.52")],
        [
            table("devices memory iterations_per_s", "8 18.9 2.33", "16 18.9 2.22"),
            # What a device keeps may be the same on any number of them.
            table("devices memory_optimizer:GiB memory_activations:GiB", "8 1.12 1.49", "16 1.12 1.49"),
        ],
    ),
    "repeat-noise": (
        [table("case devices latency:ms", "a 8 417.952", "b 8 417.902")],
        [table("case devices latency:ms", "a 8 417.952", "b 16 417.902")],
    ),
    "repeats-disagree": (
        [table("case devices latency:ms", "a 8 417.9", "b 8 517.9")],
        [table("case devices latency:ms", "a 8 417.952", "b 8 417.902")],
    ),
    "shifted-columns": (
        [
            table("loss memory:GiB", "44.2/48.0 3.20", memory_capacity="48 GB"),
            table("loss memory:GiB", "44.2/48.0 3.20"),
        ],
        [
            table("loss memory:GiB", "3.20 44.2/48.0", memory_capacity="48 GB"),
            table("throughput memory:GiB", "44.2/60.0 3.20", memory_capacity="48 GB"),
        ],
    ),
    "blank-metric": (
        [table("devices throughput mfu:%", "8 100 _", "16 _ 40")],
        [table("devices throughput mfu:%", "8 100 41", "16 OOM -")],
    ),
    "same-run-disagrees": (
        [
            table("devices throughput", "1 245", "2 478", name="a", model="gpt", batch_size="32"),
            table("devices latency:s", "1 1.28", "2 1.31", name="b", model="gpt", local_batch_size="32"),
        ],
        [
            table("devices throughput", "1 25.1", name="a", model="gpt", batch_size="32"),
            table("devices latency:s", "1 1.28", name="b", model="gpt", local_batch_size="32"),
            table("devices throughput", "1 99", name="c", model="gpt", local_batch_size="64"),
            table("devices throughput", "1 99", name="d", model="other", local_batch_size="32"),
        ],
    ),
    "tables-differ": (
        [
            table("devices throughput", "64 823", name="a", model="gpt"),
            table("devices throughput", "64 483", name="b", model="gpt"),
        ],
        [
            table("devices throughput", "64 823", name="a", model="gpt"),
            table("devices throughput", "64 683", "32 100", name="b", model="gpt"),
        ],
    ),
}

"""For each rule of the audit: tables that it must flag (+), and tables that it reads and must leave alone (-).

A table is its header, its rows and, after @, what is known of all rows, then a remark; see :func:`audit_tables.table`.
"""

from __future__ import annotations

from perfsuite.audit.table import AuditTable
from test_correctness.helpers.audit_tables import table

TABLES = """
speedup-ratio
+ devices throughput speedup; 1 101 1.0; 8 707 7.5
+ devices throughput speedup; 1 101 1.35; 8 707 7.00
- devices throughput speedup; 1 101 1.0; 8 707 7.0; 16 _ 12.0
- devices throughput speedup; 2 101 1.90; 8 353.5 6.65
- model devices throughput speedup; a 1 100 1.0; a 4 400 4.0; b 1 200 2.0; b 4 700 7.0; b 8 1200 12.0
efficiency-ratio
+ devices speedup efficiency:%; 1 1.00 100.0; 4 3.20 90.0
- devices speedup efficiency:%; 1 1.00 100.0; 4 3.20 80.0
throughput-time
+ devices global_batch_size latency:ms throughput; 8 16 417.9 45.0
- devices global_batch_size latency:ms throughput; 8 16 417.9 38.29
aggregate-as-per-device
+ devices local_batch_size latency:s throughput_per_device; 1 1 1.549 0.645; 8 1 3.950 2.025
- devices local_batch_size latency:s throughput_per_device; 1 1 1.549 0.645; 8 1 3.950 0.2532
speedup-above-n
+ devices throughput; 1 100; 2 230
- devices throughput; 1 100; 2 203
step-grows-faster-than-batch
+ devices local_batch_size iterations_per_s; 16 1 2.22; 16 2 0.81
- devices local_batch_size iterations_per_s; 16 1 2.22; 16 2 1.30
tokens-rise-with-length
+ sequence_length throughput; 2048 312; 4096 178; 8192 94 @ batch_size=16
- sequence_length throughput; 2048 312; 4096 150; 8192 70 @ batch_size=16
overhead-ratio
+ throughput overhead:%; 1000 0; 800 40.0
- throughput overhead:%; 1000 0; 800 25.0; 500 50.0
rates-disagree
+ throughput tokens_per_s; 32 66523; 40 66523 @ devices=8 sequence_length=2048
+ devices tokens_per_s tokens_per_s_per_device; 8 8000 8000
+ devices tokens_per_s tokens_per_s_per_device latency:s global_batch_size; 8 338304 14894 2.2 128
+ throughput tokens_per_s_per_device; 32.5 66560 @ devices=16 sequence_length=2048
- throughput tokens_per_s; 32 66523; 1 2860 @ devices=8 sequence_length=2048  # cut off
- devices tokens_per_s tokens_per_s_per_device; 8 8000 1000; 8 8000 _
- dp tp ep tokens_per_s tokens_per_s_per_device; 4 2 4 8000 1000  # experts on the ranks of dp
tokens-above-peak
+ tokens_per_s_per_device; 30000 @ parameters=7e9 peak_tflops=312 loss=2
+ devices tokens_per_s; 2 60000 @ parameters=7e9 peak_tflops=312
- tokens_per_s_per_device; 7000 @ parameters=7e9 peak_tflops=312 loss=2
- tokens_per_s_per_device; 20000 @ parameters=7e9 peak_tflops=312  # forward alone
- model tokens_per_s_per_device; Mixtral-8x7B 3000 @ parameters=46.7e9 peak_tflops=312 loss=2
mfu-tokens
+ mfu:% tokens_per_s_per_device loss; 40 7500 2
  @ parameters=1.00e9 peak_tflops=312 num_layers=24 hidden_size=2048 sequence_length=2048
+ mfu:% tokens_per_s_per_device loss; 40 70000 2 @ parameters=1.00e9 peak_tflops=312
- mfu:% tokens_per_s_per_device loss; 40 18000 2
  @ parameters=1.00e9 peak_tflops=312 num_layers=24 hidden_size=2048 sequence_length=2048
- mfu:% tokens_per_s_per_device loss; 40 4000 2 @ parameters=1.00e9 peak_tflops=312  # attention?
tflops-rate
+ tflops tokens_per_s_per_device loss latency:s; 15 25000 2 0.4 @ parameters=1.00e9
+ tflops tokens_per_s_per_device loss; 150 2500 2
  @ parameters=1.00e9 num_layers=24 hidden_size=2048 sequence_length=2048
- tflops tokens_per_s_per_device loss; 150 20000 2; 150 16000 2
  @ parameters=1.00e9 num_layers=24 hidden_size=2048 sequence_length=2048
mfu-tflops
+ mfu:% tflops; 40.0 124.8; 35.0 130.2 @ device=A100
- mfu:% tflops; 40.0 124.8; 35.0 109.2 @ device=A100
- device mfu:% tflops; A100 40.0 124.8; H100 40.0 395.8
- mfu:% tflops recompute=config; 40.0 124.8 no; 35.0 145.6 full @ device=A100
mfu-tflops-peak
+ mfu:% tflops; 20.0 150.0 @ peak_tflops=312
- mfu:% tflops; 40.0 160.0 @ peak_tflops=312
tflops-time
+ devices tflops latency:s; 8 100 10.0; 16 100 10.0 @ model=gpt global_batch_size=512
+ devices tflops iterations_per_s local_batch_size; 8 100 0.100 4; 16 150 0.100 4 @ model=gpt
+ devices tflops training_time:days; 384 153 84; 768 149 84 @ parameters=174.6~B
- devices tflops latency:s; 8 100 10.0; 16 100 10.0 @ global_batch_size=512  # perhaps of two models
- devices tflops training_time:days config; 384 153 84 ptd; 768 149 43 ptd; 1536 141 23 ptd; 768 88 174 zero @ model=gpt
- devices tflops latency:s; 8 100 10.0; 16 96.0 5.21; 16 0 0 @ model=gpt global_batch_size=512
- devices tflops latency:s global_batch_size sequence_length; 8 100 10.0 512 2048; 8 120 10.0 512 4096 @ model=gpt
tflops-tokens
+ tflops tokens_per_s_per_device; 150 20000; 120 20000 @ model=gpt
+ mfu:% tokens_per_s_per_device; 40.0 20000; 30.0 20000 @ model=gpt device=A100
+ devices global_batch_size latency:s tokens_per_s_per_device tflops; 8 64 2.1 15604 655; 16 128 2.2 18894 625
  @ model=7B
- devices global_batch_size latency:s tokens_per_s_per_device tflops; 8 64 2.1 15604 655; 16 128 2.2 14894 625
  @ model=7B
- model tflops tokens_per_s_per_device; a 150 20000; b 120 4000
+ device tflops tokens_per_s_per_device; GB300 1635 6288; GB200 1723 4912 @ model=deepseek-v3
- tflops tokens_per_s_per_device; 150 20000; 120 16000 @ model=gpt
- device dtype tflops tokens_per_s_per_device; GB300 fp8 2617 1024; GB200 fp8 2144 864; H100 bf16 827 328 @ model=llama
parts-above-whole
+ forward_time:ms backward_time:ms whole:ms; 250 910 1000
- forward_time:ms backward_time:ms whole:ms; 250 910 1160
nested-part
+ data_time:ms forward_time:ms backward_time:ms optimizer_time:ms latency:ms; 389.86 249.21 910.16 727.68 1549.23;
  536.59 354.97 1509.88 1234.71 2401.44
- data_time:ms forward_time:ms backward_time:ms optimizer_time:ms latency:ms; 389.86 249.21 182.48 727.68 1549.23
parts-below-whole
+ forward_time:ms backward_time:ms latency:ms; 100 200 400
- forward_time:ms backward_time:ms remainder_time:ms latency:ms; 100 200 100 400
total-row
+ config compute_time:ms; ffn 142; attention 89; total 268
- config compute_time:ms; ffn 142; attention 89; total 231
share-of-total
+ config compute_time:ms communication_time:ms share:%; ffn 142 38 45.2; other 37 0 54.8
- config compute_time:ms communication_time:ms share:%; ffn 142 38 82.9; other 37 0 17.1
share-range
+ communication_time:ms whole:ms; 8.2 53.5; 27.4 82.2 @ communication_share=15-40~%
- communication_time:ms whole:ms; 8.2 53.5; 27.4 82.2 @ communication_share=15-33~%
flops-above-peak
+ devices throughput; 1 245
  @ peak_tflops=312~TFLOPS parameters=1557611200 num_layers=48 hidden_size=1600 sequence_length=2048
- devices throughput; 1 5.7
  @ peak_tflops=312~TFLOPS parameters=1557611200 num_layers=48 hidden_size=1600 sequence_length=2048
share-out-of-range
+ mfu:%; 152.0
- mfu:%; 48.3
- mfu; 0.483
- mfu; 100%
mfu-throughput
+ devices throughput mfu:%; 32 312 41.2; 32 487 38.7
- devices throughput mfu:%; 1 245 42.3; 8 1,812 39.1
mfu-peak
+ devices throughput mfu:%; 1 245 42.3
  @ peak_tflops=312~TFLOPS parameters=1557611200 num_layers=48 hidden_size=1600 sequence_length=2048
- devices throughput mfu:%; 1 5.74 42.3; 1 0 42.3
  @ peak_tflops=312~TFLOPS parameters=1557611200 num_layers=48 hidden_size=1600 sequence_length=2048
implied-parameters
+ devices local_batch_size sequence_length tflops latency:s memory_weights:GB; 1 1 512 0.029 1.549 0.707
+ throughput mfu:%; 2567 48.3 @ devices=256 peak_tflops=312 parameters=1.6~T experts=64 top_k=2 sequence_length=2048
- devices local_batch_size sequence_length tflops latency:s parameters:M; 1 1 512 1.0 2.4 760
peak-not-dense
+ tflops; 390 @ stated_peak_tflops=1979 dense_peak_tflops=989
+ peak_tflops; 1979 @ dense_peak_tflops=989
+ device stated_peak_tflops dense_peak_tflops; 4090 330.3 165.2
- device stated_peak_tflops dense_peak_tflops; a100 312 312; 4090 82.6 165.2
size-is-count
+ model model_size:MB parameters:M; latte 457 457.1
- model model_size:MB parameters:M; latte 914 457.1
- model_size parameters:B; 1.828 0.4571
- model model_size:GiB parameters:B; Q4_0 3.56 6.74; Q8_0 6.67 6.74  # llama.cpp
bandwidth-time
+ collective communication_time:ms bandwidth:GB/s whole:ms; all_gather 0.1 8 3.3; all_reduce 2.1 45 5.3 @ devices=4
- collective communication_time:ms bandwidth:GB/s; all_gather 1.00 45.0; all_reduce 2.00 45.0 @ devices=4 model=mlp
- devices communication_time:us bandwidth:GB/s; 8 91.10 161.14; 8 8142.6 230.77 @ collective=all_reduce  # a sweep
- devices communication_time:us bandwidth:GB/s model; 8 91 161 a; 8 8142 230 a; 4 9 161 a @ collective=all_reduce
bandwidth-size
+ message_size communication_time:us algbw; 8388608 91.10 82.08 @ devices=8 collective=all_reduce
+ message_size communication_time:us busbw; 8388608 91.10 92.08 @ devices=8 collective=AllReduce
+ message_size communication_time:us bandwidth; 8388608 91.10 184.2 @ devices=8
+ message_size:MiB latency:us algbw; 8 91.10 82.08
- message_size communication_time:us algbw busbw; 8388608 91.10 92.08 161.14; 8 22.85 0.00 0.00 @ devices=8
- message_size:MB communication_time:us bandwidth; 8 91.10 92.08; 8 91.10 161.1 @ devices=8 collective=all_reduce
- message_size a=communication_time:us b=communication_time:us busbw; 8388608 91.10 80.00 183.5 @ devices=8
- message_size communication_time:us bandwidth; 1048576 91.10 92.08 @ devices=8 collective=all_gather  # one part
- message_size communication_time:us busbw; 8388608 91.10 12.08 @ devices=8 collective=unheard_of
- message_size:MB latency:ms bandwidth; 25 412.0 11.2 @ devices=8 collective=all_reduce model=gpt  # bucket and step
busbw-algbw
+ algbw busbw; 92.08 92.08 @ devices=8 collective=all_reduce
+ algbw busbw; 92.08 184.2 @ devices=8
- algbw busbw devices; 92.08 161.14 8; 92.08 80.57 8; 92.08 92.08 8; 92.08 0.00 1
- algbw busbw; 0.57 0.42 @ devices=4 collective=all_gather  # rounded to two digits
more-devices-than-there-are
+ devices latency:s; 64 2.12; 128 1.34 @ available_devices=64
- devices latency:s; 64 2.12 @ available_devices=64
batch-product
+ micro_batch_size dp num_micro_batches global_batch_size; 2 8 32 500
+ local_batch_size devices global_batch_size; 3 8 25
- micro_batch_size dp num_micro_batches global_batch_size; 2 8 32 512
- local_batch_size dp num_micro_batches global_batch_size; 2 8 32 512
- local_batch_size devices global_batch_size; 3 8 24
weights-above-memory
+ tp memory:GB; 2 42 @ parameters=175~B
+ strategy dtype devices memory; LoRA 16-bit 1 6.1 @ parameters=6.74~B
- tp memory:GB; 2 92 @ parameters=175~B
- strategy devices memory; offload 1 9 @ parameters=13~B
- dtype devices memory; nf4 1 3.6; int4 1 3.6; Q4_K 1 3.6; 4-bit 1 3.6 @ parameters=6.74~B
- strategy devices memory; QLoRA 1 6.1 @ parameters=6.74~B
- model devices memory; llama~7B~Q4_0 1 3.56 @ parameters=6.74~B
memory-exactly-inverse
+ devices memory:GB; 1 78; 2 39; 8 10 @ local_batch_size=32
- devices memory:GB; 1 78; 2 45; 8 21 @ local_batch_size=32
memory-above-capacity
+ memory:GiB; 17.2 @ memory_capacity=16~GiB
- memory:MiB; 15670 @ memory_capacity=16~GB
rate-of-out-of-memory
+ sequence_length memory throughput; 32768 OOM 28
- sequence_length memory throughput; 32768 OOM -; 2048 45 312
residual-column
+ memory_weights:GB memory_optimizer:GB memory:GB memory_final:GB; 0.707 21.182 26.169 21.889;
  0.707 16.891 19.742 17.598; 0.707 14.737 17.987 15.445
- memory_weights:GB memory_optimizer:GB memory_remainder memory:GB memory_final:GB; 0.707 21.182 4.280 26.169 21.889;
  0.707 16.891 2.144 19.742 17.598; 0.707 14.737 2.543 17.987 15.445
- memory_weights:GB memory_optimizer:GB memory:GB memory_final:GB; 0.707 21.182 26.169 22.101;
  0.707 16.891 19.742 17.703; 0.707 14.737 17.987 15.612
optimizer-not-sharded
+ devices memory_optimizer:GB; 1 21.182; 2 16.891; 4 14.737; 8 13.687
- devices memory_optimizer:GB; 1 20.000; 2 10.000; 4 5.000; 8 2.500
- devices memory_optimizer:GB; 1 20.000; 2 20.000; 4 20.000; 8 20.000
bubble-below-bound
+ schedule num_micro_batches bubble:%; 1F1B 8 22.4 @ stages=4
+ schedule num_micro_batches bubble:%; Naive 4 56.2 @ stages=4
+ num_micro_batches bubble:%; 8 22.4 @ stages=4
- schedule num_micro_batches bubble:%; 1F1B 8 27.3; GPipe 8 35.1; naive 8 75.0 @ stages=4
- schedule virtual_stages num_micro_batches bubble:%; interleaved 2 8 15.8 @ stages=4
- schedule num_micro_batches bubble:%; zero-bubble 8 5.9; interleaved 8 15.8 @ stages=4
bubble-falls-with-stages
+ stages bubble:%; 2 28.5; 4 18.2; 8 12.4 @ schedule=1F1B
- stages bubble:%; 2 11.1; 4 27.3; 8 46.7 @ schedule=1F1B
1f1b-memory-grows
+ schedule num_micro_batches memory:GB; 1F1B 8 19; 1F1B 16 23 @ stages=4
- schedule num_micro_batches memory:GB; 1F1B 8 19; 1F1B 16 19; GPipe 8 22; GPipe 16 31 @ stages=4
does-not-divide
+ tp throughput; 64 412 @ num_heads=96
+ pp throughput; 32 10 @ num_layers=24
- tp throughput; 32 412 @ num_heads=96
- pp throughput; 24 10 @ num_layers=24
layout-product
+ devices dp tp pp; 64 2 8 8
+ devices dp tp pp cp; 16384 8 8 16 8
- devices dp tp pp cp; 16384 8 8 16 16; 8192 64 8 16 1; 1024 8 8 16 16
- devices dp tp pp; 64 1 8 8
- devices dp tp pp ep sp; 32 2 4 4 2 2; 128 2 4 4 2 2
equal-digits
+ devices loss; 2 0.002376629039645; 4 0.002376629039645
- devices loss; 2 0.00237; 4 0.00237
- devices loss; 2 0.002376629039645; 4 0.002376629039645 @ simulated
constant-measurement
+ devices latency:ms; 1 417.9; 2 417.9; 4 417.9
- devices latency:ms; 1 417.9; 2 418.1; 4 417.9
- devices loss; 1 2.5; 2 2.5; 4 2.5
repeated-row
+ devices memory iterations_per_s; 8 18.9G 1.52; 16 18.9 1.52
- devices memory iterations_per_s; 8 18.9 2.33; 16 18.9 2.22
- devices memory_optimizer:GiB memory_activations:GiB; 8 1.12 1.49; 16 1.12 1.49  # any number keeps as much
repeat-noise
+ case devices latency:ms; a 8 417.952; b 8 417.902
- case devices latency:ms; a 8 417.952; b 16 417.902
repeats-disagree
+ case devices latency:ms; a 8 417.9; b 8 517.9
- case devices latency:ms; a 8 417.952; b 8 417.902
shifted-columns
+ loss memory:GiB; 44.2/48.0 3.20 @ memory_capacity=48~GB
+ loss memory:GiB; 44.2/48.0 3.20
- loss memory:GiB; 3.20 44.2/48.0 @ memory_capacity=48~GB
- throughput memory:GiB; 44.2/60.0 3.20 @ memory_capacity=48~GB
zero-figure
+ devices tokens_per_s; 0 0; 8 7706
+ latency:ms; 0.0; 12.5 @ model=gpt
- devices latency:ms communication_time:ms bubble overhead num_workers tp bandwidth; 1 12.5 0 0 0 0 0 0
blank-metric
+ devices tokens_per_s; 8 100; _ 99
+ devices throughput mfu:%; 8 100 _; 16 _ 40
- devices throughput mfu:%; 8 100 41; 16 OOM -
same-run-disagrees
+ devices throughput; 1 245; 2 478 @ model=gpt batch_size=32 name=a
+ devices latency:s; 1 1.28; 2 1.31 @ model=gpt local_batch_size=32 name=b
- devices throughput; 1 25.1 @ model=gpt batch_size=32 name=a
- devices latency:s; 1 1.28 @ model=gpt local_batch_size=32 name=b
- devices throughput; 1 99 @ model=gpt local_batch_size=64 name=c
- devices throughput; 1 99 @ model=other local_batch_size=32 name=d
tables-differ
+ devices throughput; 64 823 @ model=gpt name=a
+ devices throughput; 64 483 @ model=gpt name=b
- devices throughput; 64 823 @ model=gpt name=a
- devices throughput; 64 683; 32 100 @ model=gpt name=b
"""


def _table(line: str) -> AuditTable:
    lines, _, known = line.partition("  # ")[0].partition(" @ ")
    facts = dict(word.partition("=")[::2] for word in known.split())
    simulated = facts.pop("simulated", None) is not None
    name = facts.pop("name", "t")
    texts = {role: text.replace("~", " ") for role, text in facts.items()}
    return table(*lines.split("; "), name=name, simulated=simulated, **texts)


CASES: dict[str, tuple[list[AuditTable], list[AuditTable]]] = {}
for _line in TABLES.replace("\n  ", " ").strip().splitlines():
    if _line.startswith(("+ ", "- ")):
        next(reversed(CASES.values()))[_line.startswith("-")].append(_table(_line[2:]))
    else:
        CASES[_line] = ([], [])

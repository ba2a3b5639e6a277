"""What scripts/benchmark.py is made of, one subject a module.

cases      what is timed, its sizes, and why it cannot be
checks     values and gradients, before any speed is told
measuring  time, on a CPU by its clock and on a GPU by CUDA events
memory     the peak beyond what was there
core       the attention alone, by every provider
modules    the multi-head attention around it
models     a training step of a small language model, a beam search
wiki103    the training step of WikiText-103 by fairseq's own trainer
grid       the attention at the sizes that fused kernels are for
output     the table and the CSV
plot       the figure
"""

"""A first GEMM of the heads in Triton that takes the statistics of the logits while they are in registers.

`MARSRL_KERNELS=linear_policy_loss=triton_gemm,linear_logprob=triton_gemm` asks for it; by default cuBLAS makes a chunk
of logits and the row kernel reads it. Not run on a GPU: whether the product is as fast as cuBLAS's is what
`benchmarks/run.py linear_policy_loss linear_logprob --device cuda` is to say, and until then it is off.

Bytes moved for each logit of a 16-bit model, N = 128 columns a tile (16 bytes of pieces a row and tile):

                                          cuBLAS and row kernels                     this
    trained row, with a coefficient       4 written, 4 + 4 read, 2 of dz: 14         4 written, 4 read, 2, 32 / N: 10.25
    row that turns out to have none       4 written, 4 read: 8                       4 written, 32 / N: 4.25
    evaluation, linear_logprob forward    4 written, 4 read: 8                       32 / N: 0.25
    memory in evaluation, V = 151936      608 KB a row                               19 KB a row

Each tile of 128 rows and N columns leaves four numbers a row: maximum, sum e^d, sum d e^d relative to it, and the
target's logit if it is there: the form that row_partials gives to pieces of a row, so that the same kernels join them to
statistics or, where the vocabulary is cut over ranks, to a shard's part. Logits stay float32: what rounds them to
bfloat16 moves log-probs by up to 0.06. bfloat16 or float16 pairs are multiplied (exact products, float32 sums); float32
input stays with cuBLAS, because tensor cores would round it to TF32. The products that want no statistics, dX and dW
and logits computed again in a backward, stay with cuBLAS too.

A row is cut into tiles by the vocabulary alone and its sums have one order, without atomics: the same bits in every run.
"""

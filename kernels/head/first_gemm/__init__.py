"""A first GEMM of the heads in Triton whose logits never leave the registers.

`MARSRL_KERNELS=linear_policy_loss=triton_gemm,linear_logprob=triton_gemm` asks for it; by default cuBLAS makes a chunk
of logits and the row kernels read it. Not run on a GPU: whether the product is as fast as cuBLAS's is what
`benchmarks/run.py linear_policy_loss linear_logprob --device cuda` is to say, and until then it is off.

Bytes moved for each logit of a bfloat16 model before the products of dX and dW; a tile of 128 columns adds 16 bytes a
row of statistics and of what its exponentials are relative to, 0.125 a logit, which are written and read:

                                             cuBLAS and row kernels                  this
    trained row, with a coefficient          4 written, 4 + 4 read, 2 of dz: 14      2 written, 2 read, 2 of dz: 6
      with an entropy bonus                  14                                      4 written, 4 read, 2 of dz: 10
    row that turns out to have none          4 written, 4 read: 8                    2 written: 2 (4 with a bonus)
    backward of linear_logprob, and where
      whole sequences come first             4 written, 4 read, 2 of dz: 10          2 of dz: 2
    evaluation, linear_logprob forward       4 written, 4 read: 8                    0
    memory in evaluation, V = 151936         608 KB a row                            19 KB a row

Each tile of 128 rows and 128 columns leaves four numbers a row: maximum, sum e^d, sum d e^d relative to it, and the
target's logit if it is there: the form that row_partials gives to pieces of a row, so that the same kernels join them to
statistics or, where the vocabulary is cut over ranks, to a shard's part. All of that is float32 from the accumulators.
What becomes the gradient is e^(z / tau) / 2^k in bfloat16, with k the least integer that keeps a row's exponentials in
the tile at 1 or below: rounded as dz itself is when it is stored. The target's dz, where 1 - p matters, comes from the
statistics. An entropy bonus needs log p too, and a rounded exponential has one that is off by up to 0.004: exponentials
are float32 then, as they are for float16 models, whose dz is. Where statistics and coefficients are known before the
product (a backward, ratios of whole sequences), its epilogue makes dz itself, and there are no exponentials.

bfloat16 or float16 pairs are multiplied (exact products, float32 sums); float32 input stays with cuBLAS, because tensor
cores would round it to TF32. dX and dW stay with cuBLAS too.

A row is cut into tiles by the vocabulary alone and its sums have one order, without atomics: the same bits in every run.
"""

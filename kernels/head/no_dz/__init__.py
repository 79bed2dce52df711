"""dX and dW of the loss from the exponentials that the first GEMM leaves: dz is never written.

`MARSRL_KERNELS=linear_policy_loss=triton_no_dz` asks for it. Not run on a GPU: whether products of our own that read 2 bytes
a logit are ahead of cuBLAS's is what `benchmarks/run.py linear_policy_loss --device cuda` is to say, and until then it is off.

With E_rv = e^(z / tau) / 2^k, k of row r in the tile of v, 0 at the target (first_gemm/), and K >= k the same of the whole row,

    dz_rv = f_r 2^(k - K) E_rv + g_r 1[v = y_r]        f = -c 2^K / (tau sum e^(z / tau)),  g = c (1 - p_y) / tau

    dX_r = f_r sum_v (2^(k - K) E_rv) W_v + g_r W_y                      the power of two is exact in bfloat16
    dW_v = sum_r (f_r 2^(k - K) E_rv) X_r + sum over r with y_r = v of g_r X_r      rounded as dz is

The operand is scaled between shared memory and the tensor cores. The targets' part is float32: of dX in the epilogue, of dW by a
kernel that takes the rows of one target together, in the order of the rows. No atomics: the same bits in every run. A tile
that lies 2^-126 below its row's maximum counts as 0, as it would in float32.

It has no entropy bonus: its gradient, -e p (log p + H), needs the logit. Rows without a coefficient are left out by lists that
stay on the device: the host waits for nothing. Where whole sequences come first the statistics are known before the product
is computed again, which then writes dz itself (first_gemm/): as many bytes as exponentials are.
"""

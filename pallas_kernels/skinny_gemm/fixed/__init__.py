"""skinny_gemm whose bits for a token depend on no other token, on a GPU."""

"""Between a layer's QKV GEMM and its attention: norm and rotate heads, write keys and values."""

"""Between a layer's projection and its attention: norm and rotate heads, write keys and values."""

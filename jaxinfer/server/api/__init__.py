"""Common to all APIs: fields, forms, tools, the parts of answers."""

"""What all APIs share: fields, forms, tools, answers and their writers."""

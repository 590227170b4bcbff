"""The formats of answers, a file for each: ``answers.formats`` reads them."""

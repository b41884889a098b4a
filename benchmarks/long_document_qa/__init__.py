"""Parts of the long-document question-answering benchmark; `benchmarks.long_document_qa` runs them."""

//! GetBatch: many objects and archive members in one request, merged in strict order within bounded memory.

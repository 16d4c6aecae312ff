//! Archives from bytes to member indexes, and archives written as streams. Parsers do no I/O.

//! Python bindings: the client, and the whole program inside the wheel.

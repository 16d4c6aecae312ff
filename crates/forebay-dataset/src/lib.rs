//! Datasets: which rows there are, where each lies, and how they are read.

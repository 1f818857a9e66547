"""Data that several processes read together: who reads which rows, and how they become one batch."""

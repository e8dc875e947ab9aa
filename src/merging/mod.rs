//! Merge methods: mathematics on rows of f32, without files, models or devices.

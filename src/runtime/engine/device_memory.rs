//! [`DeviceMemory`]: the memory of a device.

use crate::bytes::ByteSize;

/// A device's memory, as its driver counts it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct DeviceMemory {
    /// Bytes in allocations of this process.
    pub allocated: ByteSize,
    /// The peak of these bytes.
    pub peak_allocated: ByteSize,
    /// Bytes that the process's pool has from the device.
    pub reserved: ByteSize,
    /// The peak of these bytes.
    pub peak_reserved: ByteSize,
    /// Free bytes of the device.
    pub free: ByteSize,
    /// All bytes of the device.
    pub total: ByteSize,
}

impl DeviceMemory {
    /// Adds up the memory of two devices.
    #[must_use]
    pub fn plus(&self, other: &Self) -> Self {
        Self {
            allocated: self.allocated + other.allocated,
            peak_allocated: self.peak_allocated + other.peak_allocated,
            reserved: self.reserved + other.reserved,
            peak_reserved: self.peak_reserved + other.peak_reserved,
            free: self.free + other.free,
            total: self.total + other.total,
        }
    }
}

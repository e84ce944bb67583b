//! The health of the drive under a volume, as the drive itself reports it.
//!
//! An NVMe drive reports it in its SMART log page (NVM Express Base Specification 2.0, 5.16.1.3). A
//! SATA drive reports it in the attributes of its SMART data (ATA/ATAPI Command Set 3, 7.52). The
//! attributes read here are the ones with the same meaning for all vendors. Both questions need
//! root, and change nothing on the drive.
//!
//! Drives behind RAID controllers, virtual disks and file systems over several drives report
//! nothing here.

use std::fs::File;
use std::io;
use std::mem::size_of;
use std::os::fd::AsRawFd;
use std::path::Path;

/// Bytes of an NVMe log page, and of ATA SMART data.
pub const PAGE_BYTES: usize = 512;

/// A drive's report. `None` for a value that it does not report.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Health {
    /// The drive itself reports a failure: worn out, read-only, no spare blocks, or too hot.
    pub is_critical: bool,
    /// Part of the rated life that is used, in percent; may exceed 100.
    pub used_percent: Option<u8>,
    /// Spare blocks left, in percent, and the least that the vendor allows.
    pub spare_percent: Option<(u8, u8)>,
    /// Bytes that the host has written to the drive.
    pub written_bytes: Option<u64>,
    /// Hours in operation.
    pub power_on_hours: Option<u64>,
    /// Errors of the medium that were not corrected, or blocks that were replaced.
    pub media_errors: Option<u64>,
}

/// Part of a rated life below which the rest cannot be estimated.
const USED_PERCENT_MIN: u8 = 2;

impl Health {
    /// Reads an NVMe SMART log page.
    #[must_use]
    pub fn of_nvme(page: &[u8; PAGE_BYTES]) -> Health {
        let number = |at: usize| {
            let mut bytes = [0; 16];
            bytes.copy_from_slice(&page[at..at + 16]);
            u64::try_from(u128::from_le_bytes(bytes)).unwrap_or(u64::MAX)
        };
        // In thousands of 512 bytes, rounded up.
        let written = number(48).saturating_mul(512_000);
        Health {
            is_critical: page[0] != 0,
            used_percent: Some(page[5]),
            spare_percent: Some((page[3], page[4])),
            written_bytes: Some(written),
            power_on_hours: Some(number(128)),
            media_errors: Some(number(160)),
        }
    }

    /// Reads ATA SMART data; `None` if its checksum is wrong.
    #[must_use]
    pub fn of_ata(data: &[u8; PAGE_BYTES]) -> Option<Health> {
        if data.iter().fold(0_u8, |sum, byte| sum.wrapping_add(*byte)) != 0 {
            return None;
        }
        let mut health = Health::default();
        for attribute in data[2..2 + 30 * 12].chunks_exact(12) {
            let (id, value) = (attribute[0], attribute[3]);
            let mut raw = [0; 8];
            raw[..6].copy_from_slice(&attribute[5..11]);
            let raw = u64::from_le_bytes(raw);
            match id {
                5 => health.media_errors = Some(raw),
                9 => health.power_on_hours = Some(raw & 0xffff_ffff),
                // Wear levelling and life left: normalised values count down from 100.
                177 | 202 | 231 | 233 => {
                    let used = 100_u8.saturating_sub(value);
                    health.used_percent = health.used_percent.max(Some(used));
                }
                241 => health.written_bytes = Some(raw.saturating_mul(512)),
                _ => {}
            }
        }
        Some(health)
    }

    /// Days that the rated life lasts at so many bytes a day; `None` if too little of it is used to
    /// tell.
    #[must_use]
    pub fn days_left(&self, bytes_per_day: u64) -> Option<u64> {
        let used = self.used_percent.filter(|used| *used >= USED_PERCENT_MIN)?;
        let written = self.written_bytes.filter(|bytes| *bytes > 0)?;
        let left = u64::from(100_u8.saturating_sub(used));
        let rest = u128::from(written) * u128::from(left) / u128::from(used);
        u64::try_from(rest / u128::from(bytes_per_day.max(1))).ok()
    }
}

/// Asks the drive under a block device.
///
/// # Errors
/// It may not be asked, or has no such report.
pub fn of_device(device: &Path) -> io::Result<Health> {
    let during = |doing: &'static str| {
        move |error: io::Error| io::Error::new(error.kind(), format!("{doing}: {error}"))
    };
    let file = File::open(device).map_err(during("opening the drive"))?;
    let mut page = [0; PAGE_BYTES];
    let name = device.file_name().unwrap_or_default().to_string_lossy();
    if name.starts_with("nvme") {
        nvme_log_page(&file, &mut page).map_err(during("reading its SMART log"))?;
        return Ok(Health::of_nvme(&page));
    }
    ata_smart_data(&file, &mut page).map_err(during("reading its SMART data"))?;
    Health::of_ata(&page).ok_or_else(|| io::Error::other("the drive's report has a wrong checksum"))
}

/// `struct nvme_admin_cmd` of the kernel's include/uapi/linux/nvme_ioctl.h.
#[repr(C)]
#[derive(Default)]
pub struct NvmeAdminCmd {
    opcode: u8,
    flags: u8,
    rsvd1: u16,
    nsid: u32,
    cdw2: u32,
    cdw3: u32,
    metadata: u64,
    addr: u64,
    metadata_len: u32,
    data_len: u32,
    cdw10: u32,
    cdw11: u32,
    cdw12: u32,
    cdw13: u32,
    cdw14: u32,
    cdw15: u32,
    timeout_ms: u32,
    result: u32,
}

const NVME_GET_LOG_PAGE: u8 = 0x02;
const NVME_LOG_SMART: u32 = 0x02;
const PATIENCE_MS: u32 = 5000;

nix::ioctl_readwrite! {
    /// `NVME_IOCTL_ADMIN_CMD`.
    nvme_admin_command, b'N', 0x41, NvmeAdminCmd
}

fn nvme_log_page(file: &File, page: &mut [u8; PAGE_BYTES]) -> io::Result<()> {
    let words = (PAGE_BYTES / 4 - 1) as u32;
    let mut command = NvmeAdminCmd {
        opcode: NVME_GET_LOG_PAGE,
        // The log of the whole drive.
        nsid: u32::MAX,
        addr: page.as_mut_ptr() as u64,
        data_len: PAGE_BYTES as u32,
        cdw10: words << 16 | NVME_LOG_SMART,
        timeout_ms: PATIENCE_MS,
        ..NvmeAdminCmd::default()
    };
    // SAFETY: the kernel writes at most `data_len` bytes to `addr`, which is borrowed for the call
    // and has that many, and its result to `command`.
    let status = unsafe { nvme_admin_command(file.as_raw_fd(), &raw mut command) }?;
    match status {
        0 => Ok(()),
        status => Err(io::Error::other(format!("NVMe status {status:#x}"))),
    }
}

/// `struct sg_io_hdr` of the kernel's include/scsi/sg.h.
#[repr(C)]
pub struct SgIoHdr {
    interface_id: i32,
    dxfer_direction: i32,
    cmd_len: u8,
    mx_sb_len: u8,
    iovec_count: u16,
    dxfer_len: u32,
    dxferp: *mut u8,
    cmdp: *const u8,
    sbp: *mut u8,
    timeout: u32,
    flags: u32,
    pack_id: i32,
    usr_ptr: *mut u8,
    status: u8,
    masked_status: u8,
    msg_status: u8,
    sb_len_wr: u8,
    host_status: u16,
    driver_status: u16,
    resid: i32,
    duration: u32,
    info: u32,
}

const SG_DXFER_FROM_DEV: i32 = -3;
const ATA_PASS_THROUGH_16: u8 = 0x85;

nix::ioctl_readwrite_bad! {
    /// `SG_IO`.
    sg_io, 0x2285, SgIoHdr
}

fn ata_smart_data(file: &File, page: &mut [u8; PAGE_BYTES]) -> io::Result<()> {
    // PIO data-in, one block by the sector count; SMART READ DATA with the key of SMART.
    let command: [u8; 16] = [
        ATA_PASS_THROUGH_16,
        4 << 1,
        0x0e,
        0,
        0xd0,
        0,
        1,
        0,
        0,
        0,
        0x4f,
        0,
        0xc2,
        0,
        0xb0,
        0,
    ];
    let mut sense = [0_u8; 32];
    let mut header = SgIoHdr {
        interface_id: i32::from(b'S'),
        dxfer_direction: SG_DXFER_FROM_DEV,
        cmd_len: size_of::<[u8; 16]>() as u8,
        mx_sb_len: sense.len() as u8,
        iovec_count: 0,
        dxfer_len: PAGE_BYTES as u32,
        dxferp: page.as_mut_ptr(),
        cmdp: command.as_ptr(),
        sbp: sense.as_mut_ptr(),
        timeout: PATIENCE_MS,
        flags: 0,
        pack_id: 0,
        usr_ptr: std::ptr::null_mut(),
        status: 0,
        masked_status: 0,
        msg_status: 0,
        sb_len_wr: 0,
        host_status: 0,
        driver_status: 0,
        resid: 0,
        duration: 0,
        info: 0,
    };
    // SAFETY: the pointers are to memory that is borrowed for the call, and the lengths are its
    // lengths; the kernel writes the outcome to `header`.
    unsafe { sg_io(file.as_raw_fd(), &raw mut header) }?;
    let is_done = header.status == 0 && header.host_status == 0 && header.resid == 0;
    match is_done {
        true => Ok(()),
        false => Err(io::Error::other("the drive has no SMART data")),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn any_page_is_read_or_refused(
            bytes in prop::collection::vec(any::<u8>(), PAGE_BYTES),
            rate in any::<u64>(),
        ) {
            let mut page: [u8; PAGE_BYTES] = bytes.try_into().unwrap();
            let health = Health::of_nvme(&page);
            prop_assert!(health.used_percent.is_some() && health.written_bytes.is_some());
            let _ = health.days_left(rate);
            // With the checksum of the data the attributes are read, whatever they are.
            let data = page[..PAGE_BYTES - 1].iter();
            let sum = data.fold(0, |sum: u8, byte| sum.wrapping_add(*byte));
            page[PAGE_BYTES - 1] = sum.wrapping_neg();
            let health = Health::of_ata(&page);
            prop_assert!(health.is_some());
            let _ = health.and_then(|health| health.days_left(rate));
        }
    }

    fn page(hex: &str) -> [u8; PAGE_BYTES] {
        let digits: Vec<u8> = hex.bytes().filter(u8::is_ascii_hexdigit).collect();
        let byte = |pair: &[u8]| u8::from_str_radix(std::str::from_utf8(pair).unwrap(), 16);
        let bytes: Vec<u8> = digits.chunks(2).map(|pair| byte(pair).unwrap()).collect();
        bytes.try_into().unwrap()
    }

    #[test]
    fn an_nvme_log_page_is_read() {
        let page = page(include_str!("../../tests/drives/nvme-smart.hex"));
        let health = Health::of_nvme(&page);
        let expected = Health {
            is_critical: false,
            used_percent: Some(12),
            spare_percent: Some((98, 10)),
            written_bytes: Some(1_234_567_890 * 512_000),
            power_on_hours: Some(21_345),
            media_errors: Some(3),
        };
        assert_eq!(health, expected);
        let mut worn = page;
        worn[0] = 1 << 3;
        assert!(Health::of_nvme(&worn).is_critical);
    }

    #[test]
    fn ata_smart_data_are_read_and_a_wrong_checksum_is_noticed() {
        let data = page(include_str!("../../tests/drives/sata-smart.hex"));
        let expected = Health {
            is_critical: false,
            used_percent: Some(7),
            spare_percent: None,
            written_bytes: Some(98_765_432_100 * 512),
            power_on_hours: Some(30_123),
            media_errors: Some(2),
        };
        assert_eq!(Health::of_ata(&data), Some(expected));
        let mut wrong = data;
        wrong[40] ^= 1;
        assert_eq!(Health::of_ata(&wrong), None);
    }

    #[test]
    fn the_days_left_follow_from_the_part_of_the_life_that_so_many_bytes_used() {
        let health = Health {
            used_percent: Some(20),
            written_bytes: Some(100_000),
            ..Health::default()
        };
        assert_eq!(health.days_left(1000), Some(400));
        assert_eq!(health.days_left(0), Some(400_000));
        let worn = Health {
            used_percent: Some(130),
            ..health
        };
        assert_eq!(worn.days_left(1000), Some(0));
        let new = Health {
            used_percent: Some(1),
            ..health
        };
        assert_eq!(new.days_left(1000), None);
    }
}

// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package conformance

import (
	"context"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"syscall"

	dra "k8s.io/kubelet/pkg/apis/dra/v1"
	"tags.cncf.io/container-device-interface/pkg/parser"
)

// stopSignal ends a driver as the kubelet ends a pod.
const stopSignal = syscall.SIGTERM

// cases returns the function that tests each requirement.
func cases() map[string]func(context.Context, *suite) {
	return map[string]func(context.Context, *suite){
		"PREP-01": casePrepareDevices, "PREP-02": casePrepareEntries, "PREP-03": casePrepareTwice,
		"PREP-04": casePrepareRestart, "PREP-05": casePrepareConcurrently, "PREP-06": casePrepareNothing,
		"PREP-07": casePrepareOneFails, "PREP-08": casePrepareLater, "PREP-09": casePrepareMissing,
		"PREP-10": casePrepareReplaced, "PREP-11": casePrepareUnallocated, "PREP-12": casePrepareOtherDriver,
		"PREP-13": casePrepareInUse, "PREP-14": casePrepareGone,
		"PREP-15": casePrepareUnnamed, "PREP-16": casePrepareNoDevices,
		"PREP-17": casePrepareMany, "PREP-18": casePrepareFast, "PREP-19": casePrepareRequestNames,
		"PREP-20": casePrepareRequests, "PREP-21": caseParametersMerged, "PREP-22": caseParametersInvalid,
		"PREP-23": caseParametersLong, "PREP-24": casePrepareCanceled, "PREP-25": casePrepareKilled,

		"UNPR-01": caseUnprepareUndoes, "UNPR-02": caseUnprepareEntries, "UNPR-03": caseUnprepareUnknown,
		"UNPR-04": caseUnprepareTwice, "UNPR-05": caseUnprepareDeleted, "UNPR-06": caseUnprepareNamesake,
		"UNPR-07": caseUnprepareRestart, "UNPR-08": caseUnprepareKilled, "UNPR-09": caseUnprepareUnreachable,
		"UNPR-10": caseUnprepareOneFails, "UNPR-11": caseUnprepareFailed, "UNPR-12": caseUnprepareNever,
		"UNPR-13": caseUnpreparePrepare, "UNPR-14": caseUnprepareLeaks, "UNPR-15": caseUnprepareRace,

		"CDI-01": caseCDINames, "CDI-02": caseCDIPresent, "CDI-03": caseCDIRemoved, "CDI-04": caseCDINotReused,
		"CDI-05": caseCDIWhole, "CDI-06": caseCDIVersion, "CDI-07": caseCDIConflict, "CDI-08": caseCDIRestart,

		"SHARE-01": caseShareID, "SHARE-02": caseShareTwo, "SHARE-03": caseShareOneClaim, "SHARE-04": caseShareIdentity,
		"SHARE-05": published(checkPolicyShared), "SHARE-06": published(checkPolicyValues),
		"SHARE-07": published(checkPolicyRange),
		"SHARE-08": published(checkPolicyConcrete), "SHARE-09": casePolicyStable, "SHARE-10": caseShareConsumed,
		"SHARE-11": caseShareRoom,

		"REG-01": caseRegistrationSocket, "REG-02": caseRegistrationInfo, "REG-03": caseRegistrationVersions,
		"REG-04": caseRegistrationBeta, "REG-05": caseRegistrationReady, "REG-06": caseRegistrationStale,
		"REG-07": caseRegistrationAgain, "REG-08": caseRegistrationRestart, "REG-09": caseRegistrationRefused,
		"REG-10": caseSocketLength, "REG-11": caseDriverName, "REG-12": caseStop,

		"UPG-01": caseUpdateBoth, "UPG-02": caseUpdateState, "UPG-03": caseUpdateOldEnds, "UPG-04": caseUpdateFails,
		"UPG-05": caseUpdateSequential,

		"PUB-01": published(checkNames), "PUB-02": casePoolCounts, "PUB-03": casePoolChange,
		"PUB-04": published(checkNodeSelection), "PUB-05": published(checkSizes), "PUB-06": published(checkPoolNames),
		"PUB-07": published(checkNodePools), "PUB-09": published(checkOwners), "PUB-10": casePublishRestores,
		"PUB-11": casePublishAgain, "PUB-14": casePublishGone,
		"PUB-12": casePublishQuiet, "PUB-13": casePublishErrors, "PUB-15": casePublishDropped,
		"ATTR-01": published(checkAttributeNames), "ATTR-02": published(checkAttributeDomains),
		"ATTR-03": published(checkAttributeValues), "ATTR-05": published(checkAttributeTypes),
		"ATTR-06": caseStableNames, "ATTR-07": published(checkBindingConditions),
		"TAINT-01": published(checkTaints), "TAINT-02": published(checkTaintDomains), "TAINT-05": caseTaintUnprepare,
		"PART-01": published(checkCounters), "SKIP-01": published(checkSkipped), "BIND-02": caseBindingRBAC,

		"STAT-01": caseStatusKeys, "STAT-02": caseStatusOthers, "STAT-03": caseStatusReady, "STAT-04": caseStatusLimits,
		"STAT-05": caseStatusNetwork,
		"STAT-06": caseStatusRefused, "STAT-07": caseStatusRemoved, "STAT-08": caseStatusRBAC,

		"HEALTH-01": caseHealthFirst, "HEALTH-02": caseHealthRepeats, "HEALTH-03": caseHealthChange,
		"HEALTH-04": caseHealthCancel, "HEALTH-05": caseHealthValues, "HEALTH-06": caseHealthNames,
		"HEALTH-07": caseHealthUnimplemented, "HEALTH-09": caseHealthVersions,

		"META-01": caseMetadataPath, "META-02": caseMetadataSubrequest, "META-03": caseMetadataStream,
		"META-04": caseMetadataReadOnly, "META-05": caseMetadataContainers, "META-06": caseMetadataUpdates,
		"META-07": caseMetadataRemoved, "META-08": caseMetadataOthers, "META-09": caseMetadataAttributes,
		"META-10": caseMetadataNetwork,

		"ADMIN-01": caseAdminAccess, "LIST-01": caseSubrequest, "TOL-01": caseTolerations,
		"WORK-01": caseTwoPods, "WORK-02": casePodGroup, "WORK-03": caseTwoNodes,

		"NET-01": caseInterfacePresent, "NET-02": caseNotAttached, "NET-03": caseInterfaceReturned,
		"NET-04": caseInterfaceRecovered, "NET-05": caseNewSandbox, "NET-06": caseTwoInterfaces,
		"NET-07": caseInterfaceConfigured, "NET-08": caseInterfaceStatus, "NET-13": published(checkCharacteristics),
		"NET-14": caseScheduled, "NET-15": caseInterfacesConnected,

		"ACCEL-01": published(checkCharacteristics), "ACCEL-02": caseAccelerator, "ACCEL-03": caseAcceleratorOthers,
		"ACCEL-04": caseAcceleratorSamePod, "ACCEL-05": caseAcceleratorApart,

		"SEC-01": caseRBAC, "SEC-03": caseFileModes, "SEC-04": caseFinalizers,
	}
}

// same ends the case if two calls returned different devices. Their order and the order of their CDI devices may
// differ.
func (s *suite) same(first, second []*dra.Device, when string) {
	if a, b := canonical(first), canonical(second); a != b {
		s.fatal("%s, the response differs from the first one:\n  first:  %s\n  second: %s", when, a, b)
	}
}

// canonical returns the devices of a response as text that does not depend on their order.
func canonical(devices []*dra.Device) string {
	var all []string
	for _, d := range devices {
		ids, requests := slices.Sorted(slices.Values(d.CdiDeviceIds)), slices.Sorted(slices.Values(d.RequestNames))
		all = append(all, fmt.Sprintf("%s requests=%v cdi=%v", deviceKey(d.PoolName, d.DeviceName, d.GetShareId()),
			requests, ids))
	}
	slices.Sort(all)
	return strings.Join(all, ", ")
}

func validCDIName(id string) bool { return parser.IsQualifiedName(id) }

// compareVersions compares two versions of the form 1.2.3.
func compareVersions(a, b string) int {
	numbers := func(v string) (n []int) {
		for part := range strings.SplitSeq(strings.TrimPrefix(v, "v"), ".") {
			i, _ := strconv.Atoi(part)
			n = append(n, i)
		}
		return n
	}
	return slices.Compare(numbers(a), numbers(b))
}

// deviceKey identifies a device of a response or an allocation.
func deviceKey(pool, device, share string) string {
	return strings.TrimSuffix(fmt.Sprintf("%s/%s#%s", pool, device, share), "#")
}

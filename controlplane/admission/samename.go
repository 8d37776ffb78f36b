// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package admission

import (
	"context"
	"fmt"
	"slices"
	"strings"

	schedulingapi "k8s.io/api/scheduling/v1beta1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	scheduling "github.com/dra-shared/dra-driver-shared/api/scheduling/v1beta1"
)

// hasSameName reports whether Kubernetes has a PodGroup of that name that was not created for one of the driver's.
// A pod that names it by the field then belongs to Kubernetes' PodGroup. The answer does not depend on the version of
// scheduling.k8s.io that the cluster serves.
func hasSameName(
	ctx context.Context, reader client.Reader, mapper meta.RESTMapper, group types.NamespacedName,
) (bool, error) {
	mapping, err := mapper.RESTMapping(schema.GroupKind{Group: schedulingapi.GroupName, Kind: scheduling.Kind})
	if meta.IsNoMatchError(err) {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("find out whether the cluster has PodGroups of %s: %w", schedulingapi.GroupName, err)
	}
	var list metav1.PartialObjectMetadataList
	list.SetGroupVersionKind(mapping.GroupVersionKind.GroupVersion().WithKind(scheduling.Kind + "List"))
	// The controller has the permission to list PodGroups, and not to get a single one.
	err = reader.List(ctx, &list, client.InNamespace(group.Namespace),
		client.MatchingFields{metav1.ObjectNameField: group.Name})
	if err != nil {
		return false, fmt.Errorf("look up PodGroup %q of %s: %w", group.Name, schedulingapi.GroupName, err)
	}
	return slices.ContainsFunc(list.Items, func(o metav1.PartialObjectMetadata) bool {
		owner := metav1.GetControllerOf(&o)
		return owner == nil || owner.Kind != scheduling.Kind || !strings.HasPrefix(owner.APIVersion, scheduling.GroupName+"/")
	}), nil
}

// sameNameWarning warns that the field at path names Kubernetes' PodGroup, and not the driver's.
func sameNameWarning(path, group string) string {
	return fmt.Sprintf("%s: names PodGroup %q of %s, not that of %s with the same name: to share the claims of the "+
		"latter, name it in the annotation %s",
		path, group, schedulingapi.GroupName, scheduling.GroupName, scheduling.GroupAnnotation)
}
